"""What `onesweep bench rounds` is made of: its links, its intervals, what it reads of a run, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.rounds_bench.command import answer_of
from loadtest.rounds_bench.difference import paired
from loadtest.rounds_bench.settings import SIX, RoundsBench, check_bench
from loadtest.rounds_bench.timeline import Busy, busy_shares, round_seconds
from loadtest.rounds_bench.uplinks import plan_options, with_uplinks, write_profile
from loadtest.training.journal import Entry
from loadtest.training.view import View, WorkerView
from loadtest.wan.profile import ROUTER, profile_named
from stages.errors import InputError, OnesweepError
from trainer.planning.link import LINKS

SHIPPED = ("lan", "links-20", "links-60", "links-150", "three-regions", "consumer")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_profile_with_slow_uplinks_is_read_as_it_was_written(name: str, tmp_path: Path) -> None:
    profile = with_uplinks(profile_named(name), 6, 5.0)
    write_profile(profile, tmp_path / "profiles.toml")
    read = profile_named(profile.name, tmp_path / "profiles.toml")
    assert replace(read, description=profile.description) == profile
    assert read.link("host-6", ROUTER).rate_mbps == 5.0
    for ends in ((ROUTER, "host-6"), ("host-1", "host-2")):
        assert read.link(*ends) == profile_named(name).link(*ends)
    assert read.link("host-2", ROUTER).delay_ms == profile_named(name).link("host-2", ROUTER).delay_ms


def test_without_a_rate_a_profile_stays_as_it_is() -> None:
    assert with_uplinks(profile_named("consumer"), 6, None) == profile_named("consumer")


def test_the_plan_is_told_the_slowest_and_the_farthest() -> None:
    options = plan_options(with_uplinks(profile_named("three-regions"), 3, 20.0), 3)
    assert options == ["--up-mbps", "20", "--down-mbps", "100", "--latency-ms", "55"]


@pytest.mark.parametrize("name", LINKS)
def test_links_that_can_be_planned_with_are_those_that_are_emulated(name: str) -> None:
    link, planned = profile_named(name).default, LINKS[name]
    assert (link.rate_mbps, link.rate_mbps, link.delay_ms) == (planned.up_mbps, planned.down_mbps, planned.latency_ms)


def test_the_interval_is_students() -> None:
    """Differences 0.01, 0.03, 0.02: deviation 0.01, and 4.303 / sqrt(3) of it."""
    found = paired([1.01, 1.53, 2.02], [1.0, 1.5, 2.0])
    assert found.mean == pytest.approx(0.02)
    assert found.half == pytest.approx(4.303 * 0.01 / 3**0.5)
    assert str(found) == "+0.0200 ± 0.0248"


def test_one_seed_has_no_interval() -> None:
    assert str(paired([1.5], [1.25])) == "+0.2500 (one seed: no interval)"


def closed(part: str, at_s: float) -> Entry:
    return Entry(at_s, {"kind": "closed", "part": part})


def test_a_round_is_timed_from_the_first_merge_on() -> None:
    entries = [closed("a", 100), closed("b", 101), closed("a", 103), Entry(104, {"kind": "accepted", "part": "a"})]
    assert round_seconds([*entries, closed("b", 106), closed("a", 108), closed("b", 111)]) == 5
    assert round_seconds(entries[:2]) is None


def view(at_s: float, round_: int, steps: int, busy_s: float) -> View:
    worker = WorkerView("w0", 0, 0, "training", round_, steps, False, False, 0, 0, 0, 0, busy_s, "")
    return View(at_s, "", False, 9, 0, 0, "", (), (worker,))


def test_a_share_is_taken_between_two_things_that_a_worker_said() -> None:
    views = [view(0, 0, 3, 1.0), view(9, 1, 0, 5.0), view(10, 1, 0, 5.0), view(12, 1, 5, 7.0), view(14, 1, 5, 7.0)]
    assert busy_shares(views, 10) == [], "twice is the least"
    later = [view(22, 2, 5, 16.0), view(23, 2, 5, 16.0)]
    assert busy_shares([*views, *later], 10) == [Busy("w0", (16 - 7) / (22 - 12), (16 - 7) / 10)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": ()}, "--seeds must be different"),
        ({"seeds": (1, 1)}, "--seeds must be different"),
        ({"seeds": tuple(range(11))}, "--seeds takes at most 10, not 11"),
        ({"up_mbps": 0.0}, "--up-mbps must be more than 0"),
        ({"within_s": 0.0}, "--within-s must be from 1"),
        ({"config": Path("nowhere.toml")}, "cannot read nowhere.toml"),
        ({"profile": "moon"}, "no profile 'moon'"),
    ],
)
def test_what_cannot_be_measured_is_told_before(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_bench(replace(RoundsBench(), **changes))  # type: ignore[arg-type]


def test_a_seed_in_the_settings_is_told(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("seed = 3\n" + SIX.read_text())
    with pytest.raises(InputError, match="has a seed; leave it out"):
        check_bench(RoundsBench(tmp_path / "run.toml", profile="loopback"))


def test_a_command_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadtest.rounds_bench.command.MODULE", ["-c", "import sys; sys.exit('onesweep: no luck')"])
    with pytest.raises(OnesweepError, match=r"^no luck$"):
        answer_of(["plan"], 60.0)
    monkeypatch.setattr("loadtest.rounds_bench.command.MODULE", ["-c", "import time; time.sleep(600)"])
    with pytest.raises(OnesweepError, match="`onesweep plan` has not ended after 0 s"):
        answer_of(["plan"], 0.2)
