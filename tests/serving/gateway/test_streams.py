"""Silent streams send comments, and streams end with their source. No real time passes."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from serving.gateway import streams
from serving.gateway.streams import WAITING, _with_comments


async def test_a_comment_is_sent_after_two_seconds_and_then_every_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    silences, released, real = list[float](), asyncio.Event(), asyncio.wait

    async def source() -> AsyncGenerator[bytes, None]:
        yield b"first"
        await released.wait()
        yield b"second"

    async def wait(tasks: Any, timeout: float) -> Any:
        silences.append(timeout)
        if len(silences) in (2, 3):
            return set(), tasks
        if len(silences) == 4:
            released.set()
        return await real(tasks)

    monkeypatch.setattr(asyncio, "wait", wait)

    assert [event async for event in _with_comments(source())] == [b"first", WAITING, WAITING, b"second"]
    assert silences[:4] == [2, 10, 10, 10]


async def test_closing_a_silent_stream_ends_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FIRST_SILENCE_S", 0.0)
    ended = list[str]()

    async def source() -> AsyncGenerator[bytes, None]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            ended.append("source")

    async with aclosing(_with_comments(source())) as events:
        assert await anext(events) == WAITING
    assert ended == ["source"]
