"""What counts as right, wrong and lost, and how waits for bytes are read off arrivals."""

from dataclasses import replace

import pytest

from loadtest.faults.base import FaultRecord
from loadtest.faults.clients import LATE, OK, Answer, SeededRequest, Try, seeded_requests
from loadtest.faults.serving_ledger import (
    Fate,
    fate_of,
    stall_s,
    stalls,
    wrong_words,
)

TEXT = b"calm sea"
GOOD = Answer(0, 10.0, 12.0, OK, TEXT, [10.5, 11.0, 12.0])
CALL = Try("UNAVAILABLE", "gone", None, TEXT[:4])
REFUSED = Try("RESOURCE_EXHAUSTED", "full", 500)
CALM = [TEXT]
KILL = FaultRecord("kill", "a-1", 10.6, 14.0)


@pytest.mark.parametrize(
    ("answer", "fate"),
    [
        (GOOD, Fate.RIGHT),
        (replace(GOOD, tries=[CALL]), Fate.RIGHT),
        (replace(GOOD, output=b"calm see"), Fate.WRONG),
        (replace(GOOD, output=TEXT[:-1]), Fate.WRONG),
        (replace(GOOD, tries=[replace(CALL, output=b"cold")]), Fate.WRONG),
        (replace(GOOD, status=LATE, output=TEXT[:3]), Fate.LOST),
        (replace(GOOD, status="INTERNAL", output=b""), Fate.LOST),
        (replace(GOOD, status=LATE, output=b"", tries=[REFUSED]), Fate.LOST),
    ],
)
def test_fates(answer: Answer, fate: Fate) -> None:
    assert fate_of(answer, CALM) is fate
    words = wrong_words([answer], [SeededRequest("ar", "The", 3)], CALM)
    assert bool(words) is (fate in (Fate.WRONG, Fate.LOST))


def test_a_stall_is_the_longest_wait_that_a_fault_may_have_made_longer() -> None:
    assert stall_s(GOOD, KILL) == pytest.approx(1.0)  # 11.0 to 12.0; before, only 10.6 to 11.0 counts
    assert stall_s(replace(GOOD, arrivals_s=[10.5, 11.9]), KILL) == pytest.approx(1.3)
    late = replace(GOOD, end_s=40.0, arrivals_s=[10.7, 20.0, 40.0])
    assert stall_s(late, replace(KILL, end_s=11.0)) == pytest.approx(9.3)  # 20 to 40 begins too late to be its doing


def test_only_requests_that_were_hit_count() -> None:
    hit, unharmed = replace(GOOD, replays=1), GOOD
    before, after = replace(hit, begin_s=5.0, end_s=10.5), replace(hit, begin_s=10.7)
    assert stalls([hit, unharmed, before, after], [KILL]) == {"kill": [pytest.approx(1.0)]}


def test_drawings_take_turns_and_wrong_ones_are_told_without_their_pixels() -> None:
    cases = seeded_requests(["chain", "steps"], 5, 0, ["cat", "dog", "cow"])
    assert [(case.mode, case.prompt) for case in cases[:3]] == [("chain", "cat"), ("steps", "dog"), ("chain", "cow")]
    assert len({case.seed for case in cases}) == len(cases) == 6
    (words,) = wrong_words([replace(GOOD, output=b"calm see")], cases, CALM)
    assert words == "chain, seed 5: wrong pixels of cat: 1 of 8 bytes differ"
    (words,) = wrong_words([replace(GOOD, output=b"calm")], cases, CALM)
    assert words == "chain, seed 5: wrong pixels of cat: 4 bytes, where 8 are right"
