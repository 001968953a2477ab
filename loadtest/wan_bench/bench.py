"""The run: one deployment for each profile, all arms taking turns; then what they wrote is read."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.machine import commit, this_machine
from loadtest.wan.profile import Profile, profile_named
from loadtest.wan_bench.ablation import Workload, ablate, collect
from loadtest.wan_bench.arms import Arm
from loadtest.wan_bench.links import LinkFigures, links_record, measure_links
from loadtest.wan_bench.place import course_of, in_a_lab, on_loopback
from loadtest.wan_bench.rows import row_of
from loadtest.wan_bench.settings import CONTROL, LOOPBACK, WanSettings, host_count
from loadtest.wan_bench.station import Station
from loadtest.wan_bench.sweep import single_sweep
from loadtest.wan_bench.turns import Sample, Seat, take_turns
from stages.bundle import find_bundle
from stages.errors import OnesweepError

Tell = Callable[[str], None]
Taken = dict[Arm, list[Sample]]


@dataclass
class WanFigures:
    """What was measured."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    links: list[LinkFigures] = field(default_factory=list)
    control: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the same requests on the profile `lan` and on plain loopback."""
    ablation: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    sweep: dict[str, Any] | None = None
    """Course and account of one request that took a single sweep, for its picture."""


def measure_wan(settings: WanSettings, profiles: Sequence[Profile | None], tell: Tell) -> WanFigures:
    """Everything, profile by profile. What cannot be measured is failed rows that say why; the rest goes on.

    :param profiles: those of `settings`; None = loopback.
    """
    figures, taken = WanFigures(), dict[str, Taken]()
    for name, profile in zip(settings.profiles, profiles, strict=True):
        arms = settings.arms()
        tell(f"{name}: {len(arms)} arms x {settings.requests * settings.at_once} requests ...")
        taken[name] = {arm: [] for arm in arms}
        problem = ""
        try:
            _measure_profile(settings, profile, taken[name], figures, tell)
        except OnesweepError as error:
            problem = str(error)
            tell(f"{name}: {problem}")
        _fill_up(settings, taken[name], problem)
        _enter(settings, profile, taken[name], figures)
    _read_texts(settings, taken, figures, tell)
    if settings.control and any(profiles):
        tell("what the lab itself costs: lan against plain loopback ...")
        try:
            figures.control = _control(settings)
        except OnesweepError as error:
            tell(f"lan against loopback: {error}")
    return figures


def wan_record(settings: WanSettings, figures: WanFigures, command: str) -> dict[str, Any]:
    """Settings, figures and what they were measured on, for a JSON file."""
    shown = asdict(settings) | {
        "choices": [choice.label for choice in settings.choices],
        "lengths": [str(length) for length in settings.lengths],
        "checkpoint": str(settings.checkpoint),
        "profiles_file": str(settings.profiles_file) if settings.profiles_file else None,
        "hosts": host_count(settings),
    }
    return {
        "bench": "wan",
        "command": command,
        "commit": commit(),
        "machine": asdict(this_machine()),
        "settings": shown,
        "rows": figures.rows,
        "links": links_record(figures.links),
        "control": figures.control,
        "ablation": figures.ablation,
        "sweep": figures.sweep,
        "samples": figures.samples,
    }


def _measure_profile(
    settings: WanSettings, profile: Profile | None, taken: Taken, figures: WanFigures, tell: Tell
) -> None:
    """Fill in `taken`, and the figures of links and ablation."""
    if profile is None:
        with on_loopback(settings) as station:
            _all_turns(settings, station, taken)
        return
    with in_a_lab(settings, profile) as (lab, station):
        figures.links += measure_links(lab, station.course)
        _all_turns(settings, station, taken)
        if settings.ablate and profile.name == settings.profiles[0]:
            for row in ablate(lab, settings.checkpoint, station, _workload(settings), tell):
                figures.ablation.append(row)


def _all_turns(settings: WanSettings, station: Station, taken: Taken) -> None:
    seats = [Seat(station, arm, settings.at_once) for arm in taken]
    with _counted(f"{station.profile}: ", len(seats) * settings.requests) as count:
        for seat, samples in take_turns(seats, settings.requests, settings.seed):
            taken[seat.arm] += samples
            count()


def _fill_up(settings: WanSettings, taken: Taken, problem: str) -> None:
    """Requests that a problem kept from being made are failures like others."""
    for samples in taken.values():
        missing = range(len(samples), settings.requests * settings.at_once)
        samples += [Sample(settings.seed + number, number, error=problem) for number in missing]


def _enter(settings: WanSettings, profile: Profile | None, taken: Taken, figures: WanFigures) -> None:
    """Rows and samples of a profile."""
    name, course = profile.name if profile else LOOPBACK, course_of(settings, profile)
    for arm, samples in taken.items():
        figures.rows.append(row_of(name, arm, samples))
        figures.samples += [_sample_record(name, arm, sample) for sample in samples]
        sweep = single_sweep(name, course, arm, samples)
        if sweep and (figures.sweep is None or sweep["length"] > figures.sweep["length"]):
            figures.sweep = sweep


def _read_texts(settings: WanSettings, taken: dict[str, Taken], figures: WanFigures, tell: Tell) -> None:
    """Put into the rows what the AR model of the hosts makes of their texts, where there is one."""
    directory = find_bundle(settings.checkpoint).ar
    if directory is None:
        return
    from loadtest.wan_bench.texts import TextReader, text_figures  # torch, when nobody's time is measured any more

    tell("the texts, as the model itself reads them ...")
    try:
        reader = TextReader(directory)
    except OnesweepError as error:
        tell(f"the texts are not read: {error}")
        return
    read = [found for arms in taken.values() for found in text_figures(arms, reader).values()]
    for row, found in zip(figures.rows, read, strict=True):
        row.update(found)


def _control(settings: WanSettings) -> list[dict[str, Any]]:
    """The same requests, in turns, in a lab of links that add next to nothing and on plain loopback."""
    length = min(settings.lengths, key=lambda length: length.count)
    with in_a_lab(settings, profile_named(CONTROL)) as (_, inside), on_loopback(settings) as outside:
        arms = [Arm(choice, length, 0.0, settings.prompts[0], settings.temperature) for choice in settings.choices]
        samples = collect([Seat(place, arm) for arm in arms for place in (inside, outside)], _workload(settings))
        return [row_of(seat.station.profile, seat.arm, taken) for seat, taken in samples.items()]


def _workload(settings: WanSettings) -> Workload:
    s = settings
    return Workload(s.choices, s.lengths, s.requests, s.seed, s.prompts[0], s.temperature, s.host_options)


def _sample_record(profile: str, arm: Arm, sample: Sample) -> dict[str, Any]:
    record: dict[str, Any] = {"profile": profile, "mode": arm.choice.label, "length": str(arm.length)}
    record |= {"idle_s": arm.idle_s, "seed": sample.seed, "prompt": arm.prompts.text(sample.number)}
    if sample.error or sample.floor is None or sample.account is None:
        return record | {"error": sample.error}
    times = {"latency_ms": sample.latency_ms, "first_byte_ms": sample.first_byte_ms}
    record |= {name: round(value, 3) for name, value in (times | asdict(sample.floor)).items()}
    return record | {"text": sample.account["text"]}


@contextlib.contextmanager
def _counted(prefix: str, total: int) -> Iterator[Callable[[], None]]:
    """Counts turns on one line of a terminal; elsewhere nothing is printed."""
    done, shown = 0, sys.stderr.isatty()

    def count() -> None:
        nonlocal done
        done += 1
        if shown:
            print(f"\r{prefix}{done} of {total} turns", end="", file=sys.stderr, flush=True)

    try:
        yield count
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
