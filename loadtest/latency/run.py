"""The run: one deployment for each profile, all arms taking turns; then texts that must be those of `ar` are compared
with them, and pictures with those of one process."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from onesweep.loadtest.lab.lab import lab_problem
from onesweep.loadtest.lab.profile import Link, Profile, node_names, profile_named
from onesweep.loadtest.latency.commands import TEXT_CHOICES, TEXT_LENGTHS, WanSettings, WarmSettings
from onesweep.loadtest.latency.floor import Course, course_of
from onesweep.loadtest.latency.interleave import Sample, Seat, collect, take_turns
from onesweep.loadtest.latency.links import measure_links
from onesweep.loadtest.latency.rows import row_of, same_as_ar, single_sweep
from onesweep.loadtest.report.record import origin, settings_record
from onesweep.loadtest.report.table import open_meter
from onesweep.loadtest.workload.arms import (
    BYTES,
    LENGTH_FLAGS,
    LEVELS,
    SCORED,
    SPECULATIVE,
    TOKENS,
    Arm,
    Length,
    ModeChoice,
)
from onesweep.loadtest.workload.prompts import NOVEL, Prompts
from onesweep.loadtest.workload.testbed import LOOPBACK, Testbed, check_host_count, default_hosts, started_testbed
from onesweep.loadtest.workload.texts import symbols_of
from onesweep.serving.drawing import DEFAULT_LEVELS, DRAWING_MODES, EXPERT_RULES
from onesweep.serving.modes import MODES
from onesweep.serving.modes.tokenizer import tokenizer_of
from onesweep.stages.backends import DEFAULT_BACKEND, backend_named
from onesweep.stages.checkpoint.bundle import Bundle, bundle_draws, find_bundle
from onesweep.stages.checkpoint.draft_head import has_draft_head
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError, OnesweepError
from onesweep.stages.limits import MAX_TEMPERATURE
from onesweep.stages.pictures.trajectory import MAX_LEVELS

CONTROL = "lan"  # the profile that is compared with plain loopback: what the lab itself costs


def check_wan(settings: WanSettings) -> list[Profile | None]:
    """Everything that can be refused before a lab is made. Returns the profiles; None = loopback, which is none.

    Raises OnesweepError.
    """
    if settings.temperature is not None and not 0 <= settings.temperature <= MAX_TEMPERATURE:
        raise InputError(f"--temperature must be 0 to {MAX_TEMPERATURE:g}, not {settings.temperature:g}")
    backend_named(settings.backend)
    profiles = [None if name == LOOPBACK else profile_named(name, settings.profiles_file) for name in settings.profiles]
    check_host_count(settings.hosts, settings.checkpoint)
    for profile in filter(None, (*profiles, profile_named(CONTROL))):
        profile.check_hosts(settings.host_count)
    if settings.lengths[0].draws:
        _check_levels(settings)
    else:
        _check_lengths(settings.checkpoint, settings.choices, settings.prompts, settings.lengths)
    if any(profiles) and (problem := lab_problem()):
        raise OnesweepError(problem)
    return profiles


# An expert's way differs from picture to picture, and has no floor of its own.
TIMED_DRAWING = tuple(mode for mode in DRAWING_MODES if mode not in EXPERT_RULES)


def settled(settings: WanSettings) -> WanSettings:
    """Settings with the bundle's own modes, lengths and prompts where none were named.

    Raises InputError for those of text where it draws, and for those of drawing where it writes.
    """
    s, where, draws = settings, settings.checkpoint, bundle_draws(settings.checkpoint)
    _check_modes(s.choices, where, TIMED_DRAWING if draws else MODES)
    if any(length.draws != draws for length in s.lengths):
        flags = LENGTH_FLAGS[LEVELS] if draws else f"{LENGTH_FLAGS[BYTES]} or {LENGTH_FLAGS[TOKENS]}"
        raise InputError(f"{where} {'draws' if draws else 'writes'}: give {flags}, not {s.lengths[0].flag}")
    if not draws:
        return replace(
            s, choices=s.choices or TEXT_CHOICES, lengths=s.lengths or TEXT_LENGTHS, prompts=s.prompts or (NOVEL,)
        )
    if s.prompts or s.temperature is not None:
        raise InputError(f"{where} draws: leave out --text, --prompt and --temperature")
    # Classes take turns as prompts do, so that no cache of one class's modulations makes a mode look quicker.
    bundle = find_bundle(where)
    served = [mode for mode in TIMED_DRAWING if getattr(bundle, mode) is not None]
    if not served:
        raise InputError(f"{where} has experts alone, whose trips differ: `onesweep bench pictures` has their delays")
    classes = read_manifest(getattr(bundle, served[0])).picture_architecture.classes
    return replace(
        s,
        choices=s.choices or tuple(map(ModeChoice, served)),
        lengths=s.lengths or (Length(DEFAULT_LEVELS, LEVELS),),
        prompts=(Prompts("classes", classes),),
    )


def check_warm(settings: WarmSettings) -> Profile:
    """The profile. Raises OnesweepError for what cannot be measured."""
    profile = profile_named(settings.profile)
    _check_modes(settings.choices, settings.checkpoint, MODES)
    _check_lengths(settings.checkpoint, settings.choices, (NOVEL,), [Length(settings.max_bytes)])
    profile.check_hosts(default_hosts(settings.checkpoint))
    if problem := lab_problem():
        raise OnesweepError(problem)
    return profile


def _check_modes(choices: Sequence[ModeChoice], where: Path, modes: Collection[str]) -> None:
    """Raises InputError for a mode of drawing where these are of text, or the reverse."""
    for choice in choices:
        if choice.mode not in modes:
            does = "writes" if modes is MODES else "draws"
            raise InputError(f"{where} {does}: mode {choice.label} does not; choose from {', '.join(modes)}")


def _check_levels(settings: WanSettings) -> None:
    """Raises InputError for a mode that the bundle has no net for, and for levels that a mode does not take."""
    bundle = find_bundle(settings.checkpoint)
    for choice in settings.choices:
        directory = getattr(bundle, choice.mode)
        if directory is None:
            raise InputError(f"mode {choice.label} needs {choice.mode}/ in {settings.checkpoint}, which has none")
        least = read_manifest(directory).architecture.parts if choice.mode == "chain" else 1
        for length in settings.lengths:
            if not least <= length.count <= MAX_LEVELS:
                raise InputError(
                    f"{length.flag} must be {least} to {MAX_LEVELS} in mode {choice.label}, not {length.count}"
                )


def _check_lengths(
    checkpoint: Path, choices: Sequence[ModeChoice], prompts: Sequence[Prompts], lengths: Sequence[Length]
) -> None:
    """Raises InputError for more symbols than the models of the chosen modes can write after the longest prompt."""
    bundle, rooms = find_bundle(checkpoint), list[int]()
    for choice in choices:
        for kind in _models(choice, bundle):
            directory = getattr(bundle, kind)
            if directory is None:
                raise InputError(f"mode {choice.label} needs {kind}/ in {checkpoint}, which has none")
            longest = _longest(tuple(text for each in prompts for text in each.texts), directory)
            rooms.append(read_manifest(directory).text_architecture.positions - longest)
    room = min(rooms)
    for length in lengths:
        if not 1 <= length.count <= room:
            what = f"{length.flag} must be 1 to {room}" if room >= 1 else f"no {length.flag} is small enough"
            raise InputError(f"{what}, what the context leaves after the prompt, not {length.count}")


@cache
def _longest(texts: tuple[str, ...], directory: Path) -> int:
    """Symbols of the longest text, for the model in `directory`."""
    tokenizer = tokenizer_of(directory)
    return max(len(symbols_of(tokenizer, text.encode())) for text in texts)


def _models(choice: ModeChoice, bundle: Bundle) -> list[str]:
    """The models of a bundle that a mode uses."""
    if choice.mode in SCORED:
        return [choice.scorer or ("scorer" if bundle.scorer else "ar"), *_drafter(choice, bundle)]
    if choice.mode == SPECULATIVE:
        return ["ar", *_drafter(choice, bundle)]
    return ["local" if choice.mode == "local" else "ar" if choice.mode == "ar" else "chain"]


def _drafter(choice: ModeChoice, bundle: Bundle) -> list[str]:
    """`local`, where the router drafts with it."""
    if (
        choice.mode == SPECULATIVE
        and choice.drafter in (None, "hosts")
        and bundle.ar
        and has_draft_head(read_manifest(bundle.ar))
    ):
        return []
    name = choice.drafter or ("lookup" if choice.mode == SPECULATIVE and not bundle.local else "model")
    return ["local"] if name in ("model", "both") else []


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
    if settings.lengths[0].draws:
        _compare_pixels(settings, taken, figures, tell)
    else:
        _compare_texts(taken, figures)
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


def _compare_texts(taken: dict[str, Taken], figures: WanFigures) -> None:
    """Put into the rows how many of their texts are those of `ar`, where they must be."""
    found = [same_as_ar(arm, arms) for arms in taken.values() for arm in arms]
    for row, same in zip(figures.rows, found, strict=True):
        row.update(same)


def _compare_pixels(settings: WanSettings, taken: dict[str, Taken], figures: WanFigures, tell: Tell) -> None:
    """Put into the rows how many of their pictures are, to the last bit, those that one process draws."""
    # Other backends add in another order: theirs are the same pictures to a shade or so, which this cannot tell.
    if settings.backend != DEFAULT_BACKEND:
        return
    from onesweep.loadtest.pictures.drawing import pixel_digests  # imports torch: only after the last measurement

    tell("the same pictures in one process ...")
    bundle, count = find_bundle(settings.checkpoint), settings.requests * settings.at_once
    expected = {
        (choice, length): pixel_digests(bundle, choice.mode, choice.codec, length.count, settings.seed, count)
        for choice in settings.choices
        for length in settings.lengths
    }
    every = [(arm, samples) for arms in taken.values() for arm, samples in arms.items()]
    for row, (arm, samples) in zip(figures.rows, every, strict=True):
        drawn = [(s.account["pixels"], expected[arm.choice, arm.length][s.number]) for s in samples if s.account]
        row.update(same_as_one=sum(one == other for one, other in drawn), compared=len(drawn))


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
    asked = {"class" if arm.length.draws else "prompt": arm.prompts.text(sample.number)}
    record |= {"idle_s": arm.idle_s, "seed": sample.seed, **asked}
    if sample.error:
        return record | {"error": sample.error}
    times = {"latency_ms": sample.latency_ms, "first_byte_ms": sample.first_byte_ms}
    record |= {name: round(value, 3) for name, value in (times | asdict(sample.least)).items()}
    written = "pixels" if arm.length.draws else "text"
    return record | {written: sample.booked[written]}
