"""Who looks on while bad input is sent: nothing that happens to them goes unseen, and none of them waits for ever."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.fuzz import answers, healthy
from loadtest.fuzz.findings import SAMPLE_BYTES, Tally
from loadtest.fuzz.run import check_empty
from serving.ports import free_port_block


class OddClient:
    """Answers, and once it is broken raises what no client should."""

    broken = False

    def __init__(self, address: str) -> None:
        return

    def __enter__(self) -> OddClient:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def generate(self, prompt: str, **settings: Any) -> Any:
        if self.broken:
            raise KeyError("who")
        return SimpleNamespace(output=b"a")


def test_a_witness_that_breaks_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(healthy, "Client", OddClient)
    witness = healthy.Healthy("router", "gateway")
    monkeypatch.setattr(OddClient, "broken", True)
    witness.start()
    witness.stop()
    assert witness.trouble == ["the thread ended: KeyError: 'who'", "no healthy request was answered"]


def test_a_dead_host_is_a_finding() -> None:
    tally = Tally("all")
    asyncio.run(check_empty([f"127.0.0.1:{free_port_block(1)}"], tally))
    assert [finding.what for finding in tally.findings] == ["a host does not say what it holds: UNAVAILABLE"]


def test_who_is_answered_nothing_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "SILENT_S", 0.5)
    dead = f"127.0.0.1:{free_port_block(1)}"
    scene: Any = SimpleNamespace(deceived=dead, between=[])
    captures: Any = SimpleNamespace(answers={method.name: [] for method in answers.STAGE.methods})

    async def send() -> answers.AnswersTarget:
        target = answers.AnswersTarget(scene, captures, random.Random(1))
        await target.send(5)
        await target.close()
        return target

    target = asyncio.run(send())
    assert [finding.what for finding in target.tally.findings] == ["nothing was answered for 0.5 s"]


def test_a_long_input_is_kept_in_part_and_its_length_in_full() -> None:
    tally = Tally("stage")
    tally.finding("it broke", bytes(SAMPLE_BYTES + 1))
    record = tally.findings[0].to_record()
    assert (len(str(record["sample_hex"])), record["sample_bytes"]) == (2 * SAMPLE_BYTES, SAMPLE_BYTES + 1)
