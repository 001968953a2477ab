"""What was read, so that others can go on: a replay has the same bytes, in the same pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from serving.router.journal import Journal
from stages.model.vocabulary import Alphabet
from stages.v1 import stage_pb2
from tests.stages.hops import step


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=2, max_size=8))
def test_sweeps_keep_their_pieces(chunks: list[bytes]) -> None:
    journal, start = Journal(), 0
    for number, (chunk, after) in enumerate(pairwise(chunks)):
        work = stage_pb2.Sweep(number=number, start=start, clean=chunk, slots=len(after))
        start += len(chunk)
        journal.add(work, start)
    last = stage_pb2.Sweep(number=len(chunks) - 1, start=start, clean=chunks[-1], slots=4)
    again = journal.replay(last)
    assert isinstance(again, stage_pb2.Sweep)
    assert (again.number, again.start, again.slots) == (last.number, 0, 4)
    assert again.clean == b"".join(chunks)
    assert list(again.reads) == [len(chunk) for chunk in chunks[:-1]]
    assert last.clean == chunks[-1], "what was pushed stays as it is"


@given(prompt=st.binary(min_size=1, max_size=200), written=st.binary(min_size=1, max_size=300))
def test_steps_that_hosts_make_by_themselves(prompt: bytes, written: bytes) -> None:
    journal = Journal()
    begun = step(number=2, clean=prompt, prompt=len(prompt), remaining=400)
    after = journal.advance(begun, len(written), written)
    assert (after.number, after.start, after.clean) == (2 + len(written), len(prompt) + len(written) - 1, written[-1:])
    assert after.sample.remaining == 400 - len(written)
    again = journal.replay(after)
    assert (again.start, again.clean) == (0, prompt + written)
    assert again.prompt == len(prompt)


@given(
    prompt=st.binary(min_size=1, max_size=200), written=st.binary(min_size=1, max_size=300), steps=st.integers(1, 99)
)
def test_steps_that_hosts_draft_by_themselves(prompt: bytes, written: bytes, steps: int) -> None:
    """They bring several symbols each."""
    journal = Journal()
    begun = step(number=2, clean=prompt, remaining=400, drafting=stage_pb2.Drafting())
    after = journal.advance(begun, steps, written)
    assert (after.number, after.start, after.clean) == (2 + steps, len(prompt) + len(written) - 1, written[-1:])
    assert after.sample.remaining == 400 - len(written)
    assert journal.replay(after).clean == prompt + written


def test_candidates_keep_every_read() -> None:
    journal = Journal()
    journal.add(step(clean=b"prompt", candidates=[b"x"]), start=6)
    journal.add(step(start=6, clean=b"one", candidates=[b"x"]), start=9)
    again = journal.replay(step(start=9, clean=b"two", candidates=[b"x"]))
    assert list(again.reads) == [6, 3]


TOKENS = Alphabet(300)
tokens = st.lists(st.integers(0, 299), min_size=1, max_size=90)


@given(prompt=tokens, written=tokens, wrong=st.lists(st.integers(0, 299), max_size=5))
def test_a_journal_of_tokens_counts_tokens(prompt: list[int], written: list[int], wrong: list[int]) -> None:
    journal = Journal(TOKENS)
    begun = step(clean=TOKENS.encode(prompt), remaining=400)
    after = journal.advance(begun, len(written), TOKENS.encode(written))
    due = len(prompt) + len(written) - 1
    assert (after.number, after.start, after.sample.remaining) == (len(written), due, 400 - len(written))
    assert TOKENS.symbols(after.clean) == written[-1:]
    guessed = step(start=due, clean=TOKENS.encode([written[-1], *wrong]), draft=len(wrong))
    journal.add(guessed, due + 1)
    again = journal.replay(step(start=due + 1, clean=TOKENS.encode([7])))
    assert TOKENS.symbols(again.clean) == [*prompt, *written, 7]
