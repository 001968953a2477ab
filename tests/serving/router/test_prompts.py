"""The router's own work on prompts: keys take turns, and no work is done that cannot be of use."""

import asyncio
import gc
import json
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from serving.client.client import AsyncClient
from serving.client.failover import RequestRefused
from serving.modes.base import Generation
from serving.modes.tokenizer import BYTE_TOKENIZER, ChatPrompt
from serving.router.accounting import Account
from serving.router.validation import PromptPools, check_fit, tokenized
from stages.errors import InputError
from stages.host import schema_check
from stages.threads import FairPool, run_to_completion
from stages.wire.status import StatusError, invalid
from tests.conftest import refused, until

SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})


async def test_a_caller_waits_for_one_job_of_another_key_only() -> None:
    pool, gate, order = FairPool(1, "test"), threading.Event(), list[str]()

    def job(name: str) -> None:
        gate.wait()
        order.append(name)

    flood = [asyncio.create_task(pool.run("mallory", job, f"mallory-{i}")) for i in range(8)]
    await asyncio.sleep(0)
    late = [asyncio.create_task(pool.run("alice", job, f"alice-{i}")) for i in range(2)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*flood, *late)
    assert {"alice-0", "alice-1"} <= set(order[:5])
    assert len(order) == 10
    assert not pool._held


async def test_a_failed_or_cancelled_job_frees_its_thread(caplog: pytest.LogCaptureFixture) -> None:
    pool, begun, gate = FairPool(1, "test"), threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        gate.wait()
        raise InputError("no")

    running = asyncio.create_task(pool.run("a", job))
    await asyncio.to_thread(begun.wait)
    running.cancel()
    await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(InputError, match="no"):
        await pool.run("a", job)
    assert await pool.run("b", lambda: 1) == 1
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize("error", [InputError("no"), invalid("no"), ValueError("no")])
async def test_errors_for_a_caller_that_left_are_dropped(error: Exception, caplog: Any) -> None:
    async def work() -> None:
        begun.set()
        await gate.wait()
        raise error

    begun, gate = asyncio.Event(), asyncio.Event()
    caller = asyncio.create_task(run_to_completion(work()))
    await begun.wait()
    caller.cancel()
    await asyncio.sleep(0)  # the caller learns it before its work fails
    gate.set()
    await asyncio.wait([caller])
    del caller
    gc.collect()
    assert caplog.messages == ["work failed after its caller had left"] * isinstance(error, ValueError)


async def test_a_prompt_that_can_never_fit_is_not_tokenized() -> None:
    class Tokens(type(BYTE_TOKENIZER)):  # type: ignore[misc]
        noun, max_token_bytes = "tokens", 16

        def encode_text(self, text: bytes) -> bytes:
            raise AssertionError("it was tokenized")

    mode: Any = type("Mode", (), {"tokenizer": Tokens(), "positions": 512})
    generation = Generation(mode="ar", prompt=b"x" * (512 * 16 + 1), max_tokens=1, due_at=0.0)
    with pytest.raises(StatusError, match=r"has 8193 bytes; .* 512 tokens never holds more than 8192"):
        await tokenized(generation, ChatPrompt(), mode, Account(), PromptPools())
    with pytest.raises(StatusError, match=r"^output \(512 bytes, each counted as a token\) and .* together take 513"):
        check_fit(replace(generation, prompt=b"x", max_tokens=512, max_bytes=512), mode)


def test_a_refused_request_is_freed(bundles: Path, local_ring: Any) -> None:
    """gRPC keeps the error that ended a call, in an object that Python's collector cannot see into."""
    mark = b"nobody else asks this " * 99

    async def refused(client: AsyncClient) -> None:
        with pytest.raises(RequestRefused, match="never holds more than"):
            await client.generate(mark, mode="ar", max_bytes=4)

    async def all_refused(address: str) -> None:
        async with AsyncClient(address) as client:
            await asyncio.gather(*(refused(client) for _ in range(20)))

    def left() -> int:
        gc.collect()
        return sum(isinstance(each, Generation) and each.prompt == mark for each in gc.get_objects())

    with local_ring(bundles / "own", 1) as ring:
        asyncio.run(all_refused(ring.address))
        until(lambda: not left())


@pytest.mark.slow
async def test_an_endless_schema_is_refused_and_delays_no_other() -> None:
    pools, endless = PromptPools(), {"type": "integer", "multipleOf": 9_999_991}
    hostile = [
        asyncio.create_task(pools.schema_problem("mallory", json.dumps({**endless, "title": str(i)}))) for i in range(6)
    ]
    good = await pools.schema_problem("alice", SCHEMA)
    assert not all(task.done() for task in hostile)
    refused = await asyncio.gather(*hostile)
    assert set(refused) == {"the JSON schema takes more than 1 s or too much memory to prepare: simplify it"}
    assert not good


async def test_a_schema_whose_check_did_not_finish_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = json.dumps({"type": "string", "title": "a check that somebody else waited for"})
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # then every child seems to have ended well
    try:
        monkeypatch.setattr(sys, "executable", "false")
        assert "or too much memory to prepare" in await PromptPools().schema_problem("alice", schema)
    finally:
        signal.signal(signal.SIGCHLD, before)
        schema_check._checked_apart.cache_clear()


async def test_a_busy_machine_does_not_reject_a_schema_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = json.dumps({"type": "string", "title": "what a busy machine was asked"})
    with monkeypatch.context() as patched:
        patched.setattr(schema_check, "CHECK_S", 1e-3)
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "too busy to check the JSON schema"):
            await PromptPools().schema_problem("alice", schema)
    assert not await PromptPools().schema_problem("alice", schema)
