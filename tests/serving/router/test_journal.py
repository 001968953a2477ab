"""The replay of a text on other hosts: the same bytes, in the same reads."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.router.host_link import Attempt
from serving.router.journal import Journal, Tries
from serving.router.paths import Hedging, Suspects
from stages.model.vocabulary import BYTES, Vocabulary
from stages.v1 import stage_pb2
from stages.wire.status import Code, StatusError
from tests.stages.hops import step


def after(*begun: tuple[Any, bytes, Sequence[bytes]]) -> Journal:
    """A journal in which each work began with its text, and brought results."""
    journal = Journal(BYTES)
    for work, text, results in begun:
        journal.begin(work, text, b"")
        for result in results:
            journal.settle(stage_pb2.Event(number=journal.due, text=result))
    return journal


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=2, max_size=8))
def test_a_replayed_sweep_keeps_its_reads(chunks: list[bytes]) -> None:
    works = [stage_pb2.Sweep(slots=4) for _ in chunks]
    texts = [b"".join(chunks[: number + 1]) for number in range(len(chunks))]
    results = [[b"abcd"]] * (len(chunks) - 1) + [[]]
    again: Any = after(*zip(works, texts, results, strict=True)).replay()
    assert (again.number, again.start, again.slots) == (works[-1].number, 0, 4) == (len(chunks) - 1, 0, 4)
    assert again.clean == b"".join(chunks)
    assert list(again.reads) == [len(chunk) for chunk in chunks[:-1]]
    assert works[-1].clean == chunks[-1], "what was pushed has what hosts had not read"


@given(prompt=st.binary(min_size=1, max_size=200), written=st.lists(st.binary(min_size=1, max_size=4), min_size=1))
def test_a_replayed_step_continues_the_sampled_text(prompt: bytes, written: list[bytes]) -> None:
    """They bring several tokens each where the last host drafts."""
    journal = after((step(prompt=len(prompt), remaining=400), prompt, written))
    whole = b"".join(written)
    for again in (journal.replay(), journal.replay()):
        assert isinstance(again, stage_pb2.Read)
        assert (again.number, again.start, again.prompt) == (len(written), 0, len(prompt))
        assert again.clean == prompt + whole
        assert again.sample.remaining == 400 - len(whole)


def test_replayed_candidates_keep_every_read() -> None:
    works = [step(candidates=[b"x"]) for _ in range(3)]
    texts = (b"prompt", b"promptone", b"promptonetwo")
    again = after(*zip(works, texts, ([b""], [b""], []), strict=True)).replay()
    assert isinstance(again, stage_pb2.Read)
    assert list(again.reads) == [6, 3]


TOKENS = Vocabulary(300)
tokens = st.lists(st.integers(0, 299), min_size=1, max_size=90)


@given(prompt=tokens, written=tokens, wrong=st.lists(st.integers(0, 299), max_size=5))
def test_tokens_are_counted_and_only_accepted_drafts_are_kept(
    prompt: list[int], written: list[int], wrong: list[int]
) -> None:
    journal, first, second = Journal(TOKENS), step(draft=len(written) - 1 + len(wrong)), step()
    journal.begin(first, TOKENS.encode(prompt), TOKENS.encode([*written[:-1], *wrong]))
    journal.settle(stage_pb2.Event(text=TOKENS.encode(written)))
    journal.kept = len(written) - 1
    journal.begin(second, TOKENS.encode(prompt + written), b"")
    again: Any = journal.replay()
    assert TOKENS.tokens(first.clean) == [*prompt, *written[:-1], *wrong]
    assert (second.number, second.start) == (1, len(prompt) + len(written) - 1)
    assert TOKENS.tokens(second.clean) == written[-1:]
    assert TOKENS.tokens(again.clean) == prompt + written


def test_an_expired_deadline_blames_no_host() -> None:
    journal, attempt = after((step(), b"a", [])), Attempt((), lambda *_: None)
    tries = Tries(journal, "ar", False, 9, 10.0, 5.0, float, Hedging(), Suspects(), lambda *_: None, lambda: True, str)
    tries.begun(attempt, 9.98)
    with pytest.raises(StatusError):
        tries.failed(attempt, stage_pb2.Fault(code=Code.DEADLINE_EXCEEDED.value[0], lost="b"), 9.99)
    assert not tries.blamed
