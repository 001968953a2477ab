"""Refusals: sentences for people, whatever somebody sent."""

from __future__ import annotations

import grpc

from stages.refusal import MAX_CHARACTERS, Refusal, invalid


def test_a_sentence_that_quotes_a_long_field_is_cut() -> None:
    refusal = invalid("x" * 10_000_000)
    assert refusal.message == str(refusal) == "x" * MAX_CHARACTERS + " ..."
    assert invalid("x" * MAX_CHARACTERS).message == "x" * MAX_CHARACTERS


def test_nobody_refuses_with_ok() -> None:
    assert Refusal.numbered(0, "no").code is grpc.StatusCode.UNKNOWN
