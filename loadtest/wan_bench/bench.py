"""The run: one lab and one deployment for each profile, all arms taking turns."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from loadtest.machine import commit, this_machine
from loadtest.wan.lab import temporary_lab
from loadtest.wan.profile import Profile, node_names, profile_named
from loadtest.wan_bench.ablation import Workload, ablate, collect
from loadtest.wan_bench.arms import Arm
from loadtest.wan_bench.deployment import deployed
from loadtest.wan_bench.floor import Course, Instant
from loadtest.wan_bench.links import LinkFigures, links_record, measure_links
from loadtest.wan_bench.rows import row_of
from loadtest.wan_bench.settings import CONTROL, WanSettings, host_count
from loadtest.wan_bench.station import open_station
from loadtest.wan_bench.sweep import single_sweep
from loadtest.wan_bench.turns import PROMPT, Sample, Seat, take_turns
from serving.deployment import temporary_deployment
from serving.ports import free_port_block
from serving.topology import local_topology
from stages.errors import OnesweepError
from stages.parts import plan_host

LOOPBACK = "loopback"

Tell = Callable[[str], None]


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


def measure_wan(settings: WanSettings, profiles: list[Profile], tell: Tell) -> WanFigures:
    """Everything, profile by profile. What cannot be measured is failed rows that say why; the rest goes on."""
    figures = WanFigures()
    for profile in profiles:
        tell(f"{profile.name}: {len(settings.arms())} arms x {settings.requests} requests ...")
        samples: dict[Arm, list[Sample]] = {arm: [] for arm in settings.arms()}
        problem = ""
        try:
            _measure_profile(settings, profile, samples, figures, tell)
        except OnesweepError as error:
            problem = str(error)
            tell(f"{profile.name}: {problem}")
        _enter(settings, profile, samples, problem, figures)
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
        "checkpoint": str(settings.checkpoint),
        "profiles_file": str(settings.profiles_file) if settings.profiles_file else None,
        "hosts": host_count(settings),
        "prompt": PROMPT,
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
    settings: WanSettings, profile: Profile, samples: dict[Arm, list[Sample]], figures: WanFigures, tell: Tell
) -> None:
    """Fill in `samples`, and the figures of links and ablation."""
    course = _course(settings, profile)
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(temporary_lab(profile, len(course.hosts)))
        figures.links += measure_links(lab, course)
        deployment = stack.enter_context(deployed(lab, settings.checkpoint))
        station = stack.enter_context(open_station(profile.name, deployment, course, lab.command))
        seats = [Seat(station, arm) for arm in samples]
        with _counted(f"{profile.name}: ", len(seats) * settings.requests) as count:
            for seat, taken in take_turns(seats, settings.requests, settings.seed):
                samples[seat.arm] += taken
                count()
        if settings.ablate and profile.name == settings.profiles[0]:
            for row in ablate(lab, settings.checkpoint, station, _workload(settings), tell):
                figures.ablation.append(row)


def _enter(
    settings: WanSettings, profile: Profile, samples: dict[Arm, list[Sample]], problem: str, figures: WanFigures
) -> None:
    """Rows and samples of a profile; requests that a problem kept from being made are failures like others."""
    course = _course(settings, profile)
    for arm, taken in samples.items():
        missing = range(settings.seed + len(taken), settings.seed + settings.requests)
        every = [*taken, *(Sample(seed, error=problem) for seed in missing)]
        figures.rows.append(row_of(profile.name, arm, every))
        figures.samples += [_sample_record(profile.name, arm, sample) for sample in every]
        sweep = single_sweep(profile.name, course, arm, taken)
        if sweep and (figures.sweep is None or sweep["output_bytes"] > figures.sweep["output_bytes"]):
            figures.sweep = sweep


def _control(settings: WanSettings) -> list[dict[str, Any]]:
    """The same requests, in turns, in a lab of links that add next to nothing and on plain loopback."""
    profile, size = profile_named(CONTROL), min(settings.sizes)
    inner = _course(settings, profile)
    hosts = len(inner.hosts)
    parts = plan_host(settings.checkpoint, (0,)).parts
    topology = local_topology(hosts, parts, settings.checkpoint, free_port_block(hosts + 1) + 1)
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(temporary_lab(profile, hosts))
        inside = stack.enter_context(deployed(lab, settings.checkpoint))
        outside = stack.enter_context(temporary_deployment(topology, settings.checkpoint, place=_dies_with_us))
        stations = (
            stack.enter_context(open_station(profile.name, inside, inner, lab.command)),
            stack.enter_context(open_station(LOOPBACK, outside, Course(inner.hosts, _no_link), _dies_with_us)),
        )
        seats = [Seat(station, Arm(choice, size)) for choice in settings.choices for station in stations]
        samples = collect(seats, _workload(settings))
        return [row_of(seat.station.profile, seat.arm, taken) for seat, taken in samples.items()]


def _course(settings: WanSettings, profile: Profile) -> Course:
    return Course(node_names(host_count(settings))[1:], profile.link)


def _workload(settings: WanSettings) -> Workload:
    return Workload(settings.choices, settings.sizes, settings.requests, settings.seed)


def _no_link(source: str, destination: str) -> Instant:
    return Instant()


def _dies_with_us(name: str, argv: list[str]) -> list[str]:
    """Runs on this machine as it is, but does not outlive this process, as nothing in a lab does."""
    return ["setpriv", "--pdeathsig", "KILL", "--", *argv]


def _sample_record(profile: str, arm: Arm, sample: Sample) -> dict[str, Any]:
    record: dict[str, Any] = {"profile": profile, "mode": arm.choice.label, "output_bytes": arm.output_bytes}
    record |= {"idle_s": arm.idle_s, "seed": sample.seed}
    if sample.error or sample.floor is None:
        return record | {"error": sample.error}
    times = {"latency_ms": sample.latency_ms, "first_byte_ms": sample.first_byte_ms}
    return record | {name: round(value, 3) for name, value in (times | asdict(sample.floor)).items()}


@contextlib.contextmanager
def _counted(prefix: str, total: int) -> Iterator[Callable[[], None]]:
    """Counts requests on one line of a terminal; elsewhere nothing is printed."""
    done, shown = 0, sys.stderr.isatty()

    def count() -> None:
        nonlocal done
        done += 1
        if shown:
            print(f"\r{prefix}{done} of {total} requests", end="", file=sys.stderr, flush=True)

    try:
        yield count
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
