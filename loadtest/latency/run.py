"""The run: one deployment for each profile, all arms taking turns; then what they wrote is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.lab.profile import Link, Profile, node_names
from loadtest.latency.checks import CONTROL
from loadtest.latency.floor import Course, course_of
from loadtest.latency.interleave import Sample, Seat, collect, take_turns
from loadtest.latency.links import measure_links
from loadtest.latency.rows import row_of, single_sweep
from loadtest.latency.settings import WanSettings
from loadtest.report.record import origin, settings_record
from loadtest.report.table import open_meter
from loadtest.workload.arms import Arm
from loadtest.workload.testbed import LOOPBACK, Testbed, started_testbed
from stages.checkpoint.bundle import find_bundle
from stages.errors import OnesweepError

Tell = Callable[[str], None]
Taken = dict[Arm, list[Sample]]


@dataclass
class WanFigures:
    """Results of a run."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)
    # Rows of the same requests on the profile `lan` and on plain loopback.
    control: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    sweep: dict[str, Any] | None = None  # course and account of one request that took a single sweep, for its picture


def measure_wan(settings: WanSettings, profiles: Sequence[Profile | None], tell: Tell) -> WanFigures:
    """Measure every profile. One that cannot be measured gets failed rows with the reason; the others are measured.

    :param profiles: those of `settings`; None = loopback.
    """
    figures, taken = WanFigures(), dict[str, Taken]()
    for name, profile in zip(settings.profiles, profiles, strict=True):
        arms = settings.arms()
        tell(f"{name}: {len(arms)} arms x {settings.requests * settings.at_once} requests ...")
        taken[name] = {arm: [] for arm in arms}
        problem = ""
        try:
            _measure_profile(settings, profile, taken[name], figures)
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


def wan_record(settings: WanSettings, figures: WanFigures) -> dict[str, Any]:
    """Settings, figures and what they were measured on, for a JSON file."""
    return {
        "bench": "wan",
        **origin(),
        "settings": settings_record(
            settings,
            choices=[choice.label for choice in settings.choices],
            lengths=[str(length) for length in settings.lengths],
            hosts=settings.host_count,
        ),
        "rows": figures.rows,
        "links": figures.links,
        "control": figures.control,
        "sweep": figures.sweep,
        "samples": figures.samples,
    }


def _testbed(settings: WanSettings, profile: str | Profile) -> AbstractContextManager[Testbed]:
    return started_testbed(
        profile, settings.host_count, settings.checkpoint, host_options=("--backend", settings.backend)
    )


def _measure_profile(settings: WanSettings, profile: Profile | None, taken: Taken, figures: WanFigures) -> None:
    """Fill in `taken` and the figures of the links."""
    with _testbed(settings, profile or LOOPBACK) as testbed:
        if testbed.network.lab:
            figures.links += measure_links(testbed.network.lab, course_of(testbed.network))
        seats = {Seat(testbed, arm, settings.at_once): arm for arm in taken}
        with open_meter(testbed.profile, len(seats) * settings.requests, "turn") as count:
            for seat, samples in take_turns(list(seats), settings.requests, settings.seed):
                taken[seats[seat]] += samples
                count(1)


def _fill_up(settings: WanSettings, taken: Taken, problem: str) -> None:
    """Requests that a problem kept from being made are failures like others."""
    for samples in taken.values():
        missing = range(len(samples), settings.requests * settings.at_once)
        samples += [Sample(settings.seed + number, number, error=problem) for number in missing]


def _enter(settings: WanSettings, profile: Profile | None, taken: Taken, figures: WanFigures) -> None:
    """Rows and samples of a profile."""
    name = profile.name if profile else LOOPBACK
    course = Course(node_names(settings.host_count)[1:], profile.link if profile else lambda *_: Link())
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
    from loadtest.latency.texts import TextReader, text_figures  # imports torch: only after the last measurement

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
    with _testbed(settings, CONTROL) as inside, _testbed(settings, LOOPBACK) as outside:
        arms = [Arm(choice, length, 0.0, settings.prompts[0], settings.temperature) for choice in settings.choices]
        seats = {Seat(place, arm): arm for arm in arms for place in (inside, outside)}
        samples = collect(list(seats), settings.requests, settings.seed)
        return [row_of(seat.testbed.profile, seats[seat], taken) for seat, taken in samples.items()]


def _sample_record(profile: str, arm: Arm, sample: Sample) -> dict[str, Any]:
    record: dict[str, Any] = {"profile": profile, "mode": arm.choice.label, "length": str(arm.length)}
    record |= {"idle_s": arm.idle_s, "seed": sample.seed, "prompt": arm.prompts.text(sample.number)}
    if sample.error:
        return record | {"error": sample.error}
    times = {"latency_ms": sample.latency_ms, "first_byte_ms": sample.first_byte_ms}
    record |= {name: round(value, 3) for name, value in (times | asdict(sample.least)).items()}
    return record | {"text": sample.booked["text"]}
