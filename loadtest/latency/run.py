"""The run of `bench wan`: one deployment for each profile, all variants taking turns; then texts that must be those of
`ar` are compared with them."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from onesweep.loadtest.commands import BenchReport, say
from onesweep.loadtest.lab.lab import lab_problem
from onesweep.loadtest.lab.profile import Profile, profile_named
from onesweep.loadtest.latency.commands import LEVELS, Length, WanSettings
from onesweep.loadtest.latency.rows import row_of, same_as_ar, wan_table
from onesweep.loadtest.latency.turns import RequestSeries, Sample, Seat, take_turns
from onesweep.loadtest.report.record import settings_record
from onesweep.loadtest.report.table import open_meter
from onesweep.loadtest.workload.prompts import NOVEL, Prompts
from onesweep.loadtest.workload.testbed import LOOPBACK, check_host_count, started_testbed
from onesweep.loadtest.workload.variants import ModeVariant
from onesweep.serving.drawing import DEFAULT_LEVELS, DRAWING_MODES, EXPERT_RULES
from onesweep.stages.backends import backend_named
from onesweep.stages.checkpoint.bundle import bundle_draws, find_bundle
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError, OnesweepError

USUAL = tuple(map(ModeVariant, ("sweep", "chunked", "ar", "ar-speculative")))
# An expert's way differs from picture to picture, and has no floor of its own.
TIMED_DRAWING = tuple(mode for mode in DRAWING_MODES if mode not in EXPERT_RULES)

Taken = dict[RequestSeries, list[Sample]]


def settled(settings: WanSettings) -> WanSettings:
    """Settings with the bundle's own modes, lengths and prompts where none were named. Raises InputError."""
    s = settings
    if not bundle_draws(s.checkpoint):
        lengths = s.lengths or (Length(32), Length(128))
        return replace(s, variants=s.variants or USUAL, lengths=lengths, prompts=s.prompts or (NOVEL,))
    if s.prompts or s.temperature is not None or any(not length.draws for length in s.lengths):
        raise InputError(f"{s.checkpoint} draws: it takes --levels, and no prompts, bytes or temperature")
    bundle = find_bundle(s.checkpoint)
    served = [mode for mode in TIMED_DRAWING if getattr(bundle, mode) is not None]
    if not served:
        raise InputError(f"{s.checkpoint} has experts alone, whose trips differ from picture to picture")
    # Classes take turns as prompts do, so that no cache of one class's modulations makes a mode look quicker.
    classes = read_manifest(getattr(bundle, served[0])).picture_architecture.classes
    return replace(
        s,
        variants=s.variants or tuple(map(ModeVariant, served)),
        lengths=s.lengths or (Length(DEFAULT_LEVELS, LEVELS),),
        prompts=(Prompts("classes", classes),),
    )


def check_wan(settings: WanSettings) -> list[Profile | None]:
    """The profiles; None = loopback, which is none. What a router refuses becomes a row that failed.

    Raises OnesweepError.
    """
    backend_named(settings.backend)
    profiles = [None if name == LOOPBACK else profile_named(name, settings.profiles_file) for name in settings.profiles]
    check_host_count(settings.hosts, settings.checkpoint)
    for profile in filter(None, profiles):
        profile.check_hosts(settings.host_count)
    if any(profiles) and (problem := lab_problem()):
        raise OnesweepError(problem)
    return profiles


def series_of(settings: WanSettings) -> list[RequestSeries]:
    """Every variant at every length with every kind of prompt, also after idle time."""
    s = settings
    return [
        RequestSeries(variant, length, idle_s, prompts)
        for prompts in s.prompts
        for idle_s in ([0.0, s.idle_s] if s.idle_s else [0.0])
        for variant in (
            each.having(temperature=s.temperature) if s.temperature is not None else each for each in s.variants
        )
        for length in s.lengths
    ]


def measure_wan(settings: WanSettings, profiles: Sequence[Profile | None]) -> BenchReport:
    """Measure every profile. One that cannot be measured gets failed rows with the reason; the others are measured.

    :param profiles: those of `settings`; None = loopback.
    """
    rows, samples = list[dict[str, Any]](), list[dict[str, Any]]()
    for name, profile in zip(settings.profiles, profiles, strict=True):
        taken: Taken = {series: [] for series in series_of(settings)}
        say(f"{name}: {len(taken)} variants x {settings.requests * settings.at_once} requests ...")
        problem = ""
        try:
            _measure_profile(settings, profile, taken)
        except OnesweepError as error:
            problem = str(error)
        for series, found in taken.items():
            # requests that a problem kept from being made are failures like others
            missing = range(len(found), settings.requests * settings.at_once)
            found += [Sample(settings.seed + number, number, error=problem) for number in missing]
            samples += [_sample_record(name, series, sample) for sample in found]
        rows += [row_of(name, series, found) | same_as_ar(series, taken) for series, found in taken.items()]
    record = {
        "bench": "wan",
        "settings": settings_record(
            settings,
            variants=[variant.label for variant in settings.variants],
            lengths=[str(length) for length in settings.lengths],
            hosts=settings.host_count,
        ),
        "rows": rows,
        "samples": samples,
    }
    return BenchReport(wan_table(rows), record, holds=not any(row["failures"] for row in rows))


def _measure_profile(settings: WanSettings, profile: Profile | None, taken: Taken) -> None:
    backend = ("--backend", settings.backend)
    with started_testbed(
        profile or LOOPBACK, settings.host_count, settings.checkpoint, host_options=backend
    ) as testbed:
        seats = {Seat(testbed, series, settings.at_once): series for series in taken}
        with open_meter(testbed.profile, len(seats) * settings.requests, "turn") as count:
            for seat, samples in take_turns(list(seats), settings.requests, settings.seed):
                taken[seats[seat]] += samples
                count(1)


def _sample_record(profile: str, series: RequestSeries, sample: Sample) -> dict[str, Any]:
    record: dict[str, Any] = {"profile": profile, "mode": series.variant.label, "length": str(series.length)}
    asked = {"class" if series.length.draws else "prompt": series.prompts.text(sample.number)}
    record |= {"idle_s": series.idle_s, "seed": sample.seed, **asked}
    if sample.error:
        return record | {"error": sample.error}
    times = {"latency_ms": sample.latency_ms, "first_byte_ms": sample.first_byte_ms}
    record |= {name: round(value, 3) for name, value in (times | asdict(sample.least)).items()}
    written = "pixels" if series.length.draws else "text"
    return record | {written: sample.booked[written]}
