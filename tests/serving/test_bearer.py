"""A release is brought to a host: its files too, where the host lacks them, or has damaged ones."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from serving import bearer
from stages.contents import Contents
from stages.refusal import Refusal

CONTENTS = Contents({"ar": b"{}"})


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of a host that loads nothing before it is stored anew."""
    steps: list[str] = []

    async def load(link: object, name: str, keep: object) -> None:
        steps.append("load")
        if "store" not in steps:
            raise Refusal(codes[0], "no")

    async def store(link: object, contents: object) -> int:
        steps.append("store")
        return 0

    monkeypatch.setattr(bearer, "load", load)
    monkeypatch.setattr(bearer, "store", store)
    return steps


codes: list[grpc.StatusCode] = []


def bring(code: grpc.StatusCode, contents: Contents | None) -> None:
    codes[:] = [code]
    link: Any = None
    asyncio.run(bearer.bring(link, "0" * 16, contents))


@pytest.mark.parametrize("code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION])
def test_what_is_lacking_or_damaged_is_stored_once(done: list[str], code: grpc.StatusCode) -> None:
    bring(code, CONTENTS)
    assert done == ["load", "store", "load"]


@pytest.mark.parametrize(("code", "contents"), [(grpc.StatusCode.ABORTED, CONTENTS), (grpc.StatusCode.NOT_FOUND, None)])
def test_other_refusals_are_passed_on(done: list[str], code: grpc.StatusCode, contents: Contents | None) -> None:
    with pytest.raises(Refusal):
        bring(code, contents)
    assert done == ["load"]
