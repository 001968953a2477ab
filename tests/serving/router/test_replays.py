"""What other hosts are sent that go on with a text: the same bytes, in the same pieces."""

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serving.router.session import Session
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2
from tests.serving.router.test_session import RecordingRing, deliver, opened
from tests.stages.hops import step


async def after(*pushed: tuple[Any, bytes, Sequence[bytes]], vocabulary: Vocabulary = BYTES) -> Session:
    """A session in which each work was pushed with its text, and brought results."""
    session = opened(RecordingRing(), capacity=4096)
    session.vocabulary = vocabulary
    for work, text, results in pushed:
        await session.push(work, text)
        for result in results:
            event = stage_pb2.Event(number=session._number, text=result)
            if work.WhichOneof("ask") == "score":
                event.scores.nats = b""
            deliver(session.attempts[0], event)
            await session.event()
    return session


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=2, max_size=8))
def test_sweeps_keep_their_pieces(chunks: list[bytes]) -> None:
    async def replayed() -> tuple[Any, Any]:
        session = opened(RecordingRing(), capacity=4096)
        for number in range(len(chunks)):
            work = stage_pb2.Sweep(slots=4)
            await session.push(work, b"".join(chunks[: number + 1]))
            if number + 1 < len(chunks):
                deliver(session.attempts[0], stage_pb2.Event(number=number, text=b"abcd"))
                await session.event()
        return work, session._replay()

    last, again = asyncio.run(replayed())
    assert (again.number, again.start, again.slots) == (last.number, 0, 4) == (len(chunks) - 1, 0, 4)
    assert again.clean == b"".join(chunks)
    assert list(again.reads) == [len(chunk) for chunk in chunks[:-1]]
    assert last.clean == chunks[-1], "what was pushed has what hosts had not read"


@given(prompt=st.binary(min_size=1, max_size=200), written=st.lists(st.binary(min_size=1, max_size=4), min_size=1))
def test_steps_that_hosts_make_by_themselves(prompt: bytes, written: list[bytes]) -> None:
    """They bring several tokens each where the last host drafts."""
    begun = step(prompt=len(prompt), remaining=400)
    session = asyncio.run(after((begun, prompt, written)))
    whole = b"".join(written)
    for again in (session._replay(), session._replay()):
        assert isinstance(again, stage_pb2.Read)
        assert (again.number, again.start, again.prompt) == (len(written), 0, len(prompt))
        assert again.clean == prompt + whole
        assert again.sample.remaining == 400 - len(whole)


def test_candidates_keep_every_read() -> None:
    works = [step(candidates=[b"x"]) for _ in range(3)]
    texts = (b"prompt", b"promptone", b"promptonetwo")
    results = ([b""], [b""], [])
    session = asyncio.run(after(*zip(works, texts, results, strict=True)))
    again = session._replay()
    assert isinstance(again, stage_pb2.Read)
    assert list(again.reads) == [6, 3]


TOKENS = Vocabulary(300)
tokens = st.lists(st.integers(0, 299), min_size=1, max_size=90)


@given(prompt=tokens, written=tokens, wrong=st.lists(st.integers(0, 299), max_size=5))
def test_tokens_are_counted_and_only_accepted_drafts_are_kept(
    prompt: list[int], written: list[int], wrong: list[int]
) -> None:
    async def pushed() -> tuple[Any, Any, Any]:
        session = await after(vocabulary=TOKENS)
        first, second = step(draft=len(written) - 1 + len(wrong)), step()
        await session.push(first, TOKENS.encode(prompt), TOKENS.encode([*written[:-1], *wrong]))
        deliver(session.attempts[0], stage_pb2.Event(text=TOKENS.encode(written)))
        await session.event()
        session.keep(len(written) - 1)
        await session.push(second, TOKENS.encode(prompt + written))
        return first, second, session._replay()

    first, second, again = asyncio.run(pushed())
    assert TOKENS.tokens(first.clean) == [*prompt, *written[:-1], *wrong]
    assert (second.number, second.start) == (1, len(prompt) + len(written) - 1)
    assert TOKENS.tokens(second.clean) == written[-1:]
    assert TOKENS.tokens(again.clean) == prompt + written
