"""The run of `bench wan`: a deployment for each profile or kind of link, with all variants taking turns; then a
comparison of texts that must equal those of `ar`.

The order rotates, so that a slow moment of the machine affects every variant.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from loadtest.commands import BenchReport, check_names, echo, settings_record
from loadtest.latency.floor import BookedCost, Floor, floor_of
from loadtest.report.table import Column, number_column, open_meter, percentile, table, text_column
from loadtest.workload.prompts import BUILT_IN, LEVELS, NOVEL, Length, Prompts
from loadtest.workload.testbed import Testbed, check_network, deployed, joined, open_network
from loadtest.workload.texts import LOCAL_COLUMNS, local_distance, served_copy
from serving.client.variants import ModeVariant
from serving.modes import DEFAULT_LEVELS, DRAWING_MODES, WITHOUT_HOSTS
from serving.router.request import Request
from stages.checkpoint.bundle import bundle_draws, find_bundle
from stages.checkpoint.manifest import read_manifest
from stages.errors import InputError, OnesweepError
from stages.wire.links import DIRECT, KINDS

if TYPE_CHECKING:
    from loadtest.benches import WanSettings

NOTHING = Floor(0.0, 0.0, 0.0)  # of a request that failed


@dataclass(frozen=True)
class RequestSeries:
    """Requests that differ only in prompt and seed: one row of the table."""

    variant: ModeVariant
    length: Length
    prompts: Prompts = NOVEL

    def call(self, number: int, seed: int) -> dict[str, Any]:
        """Arguments of `Client.generate` or `Client.draw` for the request with this number."""
        asked, count = self.prompts.text(number), self.length.count
        if self.length.draws:
            return {"classes": asked, "levels": count, "seed": seed, **self.variant.request()}
        return {"prompt": asked, f"max_{self.length.unit}": count, "seed": seed, **self.variant.request()}


@dataclass(frozen=True)
class Sample:
    """One request: its times at the client and its account, or the reason for its failure."""

    seed: int
    number: int = 0  # of the request within its series; determines its prompt
    latency_ms: float = 0.0  # from the call to the end of the account
    first_byte_ms: float = 0.0
    floor: Floor = NOTHING
    account: dict[str, Any] = field(default_factory=dict)  # `Result.as_json()`, or that of pictures
    error: str = ""


def take_turns(
    every: Sequence[tuple[Testbed, RequestSeries]], requests: int, at_once: int, seed: int
) -> Iterator[tuple[Testbed, RequestSeries, list[Sample]]]:
    """Run `requests` turns of each series, after a warm-up turn that does not count. A failure is a sample too.

    Turn i of every series has the same prompts and seeds.

    :param at_once: simultaneous requests in a turn.
    """
    for testbed, series in every:
        _turn(testbed, series, range(at_once), seed)
    for i in range(requests):
        # in a different order each time: no series always follows one that leaves the machine hot or the links busy
        first, numbers = i % len(every), range(i * at_once, (i + 1) * at_once)
        for testbed, series in (*every[first:], *every[:first]):
            yield testbed, series, _turn(testbed, series, numbers, seed)


def sample_of(testbed: Testbed, number: int, seed: int, answer: dict[str, Any]) -> Sample:
    if "error" in answer:
        return Sample(seed, number, error=answer["error"])
    network = testbed.network
    floor = floor_of(BookedCost.of(answer["account"]), network.nodes[1:], network.link)
    return Sample(seed, number, answer["latency_ms"], answer["first_byte_ms"], floor, answer["account"])


def _turn(testbed: Testbed, series: RequestSeries, numbers: range, seed: int) -> list[Sample]:
    """Make the requests with these numbers; number 0 has the seed `seed`."""
    answers = testbed.caller.ask([series.call(number, seed + number) for number in numbers])
    return [sample_of(testbed, n, seed + n, answer) for n, answer in zip(numbers, answers, strict=True)]


Taken = dict[RequestSeries, list[Sample]]
Row = dict[str, Any]


def with_defaults(settings: WanSettings) -> WanSettings:
    """Settings with the bundle's own modes, lengths and prompts where none were given.

    Raises OnesweepError for impossible networks and texts. A request that one mode refuses becomes a failed row.
    """
    s = settings
    check_names("--text", s.texts, BUILT_IN)
    check_names("--profile", s.profiles)
    check_names("--links", s.links, KINDS)
    for name in s.profiles:
        check_network(name, s.host_count, s.checkpoint, s.links)
    bundle = find_bundle(s.checkpoint)
    if not bundle_draws(s.checkpoint):
        lengths = s.lengths or (Length(32), Length(128))
        if any(length.draws for length in lengths):
            raise InputError(f"{s.checkpoint} writes text: give --bytes or --max-tokens, not --levels")
        for length in lengths:  # like the check of each request
            asked: dict[str, Any] = {f"max_{length.unit}": length.count, "temperature": s.temperature}
            Request(**asked).message()
        models = [read_manifest(path).text_architecture for path in bundle.models.values()]
        if (longest := max(length.count for length in lengths)) >= (most := max(each.positions for each in models)):
            raise InputError(f"a length of {longest} leaves no room for a prompt in the context of {most}")
        prompts = tuple(BUILT_IN[name] for name in s.texts or (NOVEL.name,))
        modes = ["sweep", "chunked"] * (bundle.chain is not None) + ["ar", "ar-speculative"] * (bundle.ar is not None)
        variants = s.variants or tuple(map(ModeVariant, [*modes, *served_copy(s.checkpoint)]))
        return replace(s, variants=variants, lengths=lengths, prompts=prompts)
    if s.texts or s.temperature is not None or any(not length.draws for length in s.lengths):
        raise InputError(f"{s.checkpoint} draws pictures: give --levels, but no prompts, bytes or temperature")
    served = [mode for mode in DRAWING_MODES if mode in bundle.models]
    # Classes take turns like prompts, so that no cache of one class's modulations makes a mode look quicker.
    classes = read_manifest(bundle.models[served[0]]).picture_architecture.classes
    return replace(
        s,
        variants=s.variants or tuple(map(ModeVariant, served)),
        lengths=s.lengths or (Length(DEFAULT_LEVELS, LEVELS),),
        prompts=(Prompts("classes", classes),),
    )


def series_of(settings: WanSettings) -> list[RequestSeries]:
    """A series for every variant, length and kind of prompt."""
    variants, t = settings.variants, settings.temperature
    if t is not None:
        variants = tuple(each.having(temperature=t) for each in variants)
    prompts, lengths = settings.prompts, settings.lengths
    return [RequestSeries(variant, length, text) for text in prompts for variant in variants for length in lengths]


def measure_wan(settings: WanSettings) -> BenchReport:
    """Measure every profile. One that cannot be measured gets failed rows with the reason, and the others proceed."""
    rows, samples = list[Row](), list[dict[str, Any]]()
    for name in settings.profiles:
        every = {links: Taken({series: [] for series in series_of(settings)}) for links in settings.links or ("",)}
        echo(f"{name}: {sum(map(len, every.values()))} variants x {settings.requests * settings.at_once} requests ...")
        problem = ""
        try:
            _measure_profile(settings, name, every)
        except OnesweepError as error:
            problem = str(error)
        for links, taken in every.items():
            for series, found in taken.items():
                # requests prevented by a problem are failures like others
                missing = range(len(found), settings.requests * settings.at_once)
                found += [Sample(settings.seed + number, number, error=problem) for number in missing]
                samples += [_sample_record(name, series, sample) for sample in found]
                row = row_of(name, series, found, links) | same_as_ar(series, taken)
                if links:  # beside the same requests over direct links, made at about the same time
                    both = zip(found, every.get(DIRECT, {}).get(series, []), strict=False)
                    ratios = [a.latency_ms / b.latency_ms for a, b in both if not (a.error or b.error)]
                    row["over_direct"] = statistics.median(ratios) if ratios else None
                if series.variant.mode in WITHOUT_HOSTS and not series.length.draws:
                    good = [(series.prompts.text(each.number), each.account) for each in found if not each.error]
                    texts = [(prompt.encode(), bytes.fromhex(account["output_hex"])) for prompt, account in good]
                    row |= local_distance(settings.checkpoint, texts)
                rows.append(row)
    record = {
        "settings": settings_record(
            settings,
            variants=[variant.label for variant in settings.variants],
            lengths=[str(length) for length in settings.lengths],
            hosts=settings.host_count,
        ),
        "rows": rows,
        "samples": samples,
    }
    return BenchReport(wan_table(rows), record, passed=not any(row["failures"] for row in rows))


def _measure_profile(settings: WanSettings, profile: str, every: Mapping[str, Taken]) -> None:
    """:param every: by kind of link; all kinds are up at once and take turns, so that a drift of the machine affects
    each."""
    s, rows = settings, list[tuple[Testbed, RequestSeries]]()
    with ExitStack() as stack:
        for links, taken in every.items():
            network = stack.enter_context(open_network(profile, s.host_count, links))
            testbed = stack.enter_context(joined(network, s.checkpoint) if links else deployed(network, s.checkpoint))
            rows += [(testbed, series) for series in taken]
        meter = stack.enter_context(open_meter(desc=profile, total=len(rows) * s.requests, unit="turn"))
        for testbed, series, samples in take_turns(rows, s.requests, s.at_once, s.seed):
            every[testbed.network.links][series] += samples
            meter.update()


def _sample_record(profile: str, series: RequestSeries, sample: Sample) -> dict[str, Any]:
    record: dict[str, Any] = {"profile": profile, "mode": series.variant.label, "length": str(series.length)}
    asked = {"class" if series.length.draws else "prompt": series.prompts.text(sample.number)}
    record |= {"seed": sample.seed, **asked}
    if sample.error:
        return record | {"error": sample.error}
    times = {"latency_ms": sample.latency_ms, "first_byte_ms": sample.first_byte_ms}
    record |= {name: round(value, 3) for name, value in (times | asdict(sample.floor)).items()}
    if series.length.draws:
        return record | {"pixels": hashlib.sha256(bytes.fromhex(sample.account["output_hex"])).hexdigest()}
    return record | {"text": sample.account["text"]}


# Rows of the table, one for each series of requests on each profile


def row_of(profile: str, series: RequestSeries, samples: Sequence[Sample], links: str = "") -> Row:
    """Medians over successful requests, with the number of failures and the most frequent one."""
    good = [sample for sample in samples if not sample.error]
    errors = Counter(sample.error for sample in samples if sample.error).most_common(1)
    latencies = sorted(sample.latency_ms for sample in good)

    def median(value: Callable[[Sample], float]) -> float | None:
        return statistics.median(map(value, good)) if good else None

    def count(value: Callable[[Sample], int]) -> int | None:
        """The lower median: a count of an actual request, not a mean of two."""
        return statistics.median_low(map(value, good)) if good else None

    row = {
        "profile": profile,
        "links": links or None,
        "hop_ms": median(lambda s: s.latency_ms / s.account["hops"]) if links else None,
        "mode": series.variant.label,
        "text": series.prompts.name,
        "length": series.length.count,
        "unit": series.length.unit,
        "temperature": series.variant.get("temperature"),
        "requests": len(samples),
        "failures": len(samples) - len(good),
        "error": errors[0][0] if errors else None,
        "p50_ms": median(lambda s: s.latency_ms),
        "p95_ms": percentile(latencies, 95),
        "first_byte_ms": median(lambda s: s.first_byte_ms),
        "floor_ms": median(lambda s: s.floor.total_ms),
        "ratio": median(lambda s: s.latency_ms / s.floor.total_ms),
        "sweeps": count(lambda s: int(s.account["sweeps"])),
        "hops": count(lambda s: int(s.account["hops"])),
        "wire_bytes": count(lambda s: int(s.account["wire_bytes_total"])),
        "largest_hop_bytes": count(lambda s: max(s.account["wire_bytes"], default=0)),
        "host_seconds": median(lambda s: sum(host["compute_ms"] for host in s.account["hosts"]) / 1000),
    }
    if series.length.draws:
        return row
    return row | {
        "tokens": count(lambda s: int(s.account["output_tokens"])),
        "tokens_per_s": median(lambda s: int(s.account["output_tokens"]) / s.latency_ms * 1000),
        "acceptance": acceptance(good),
        "same_as_ar": None,
        "compared": None,
    }


def acceptance(samples: Sequence[Sample]) -> float | None:
    """Share of the draft tokens reached that were accepted; None without drafts."""
    reached = sum(sample.account.get("reached") or 0 for sample in samples)
    return sum(sample.account["accepted"] for sample in samples) / reached if reached else None


def same_as_ar(series: RequestSeries, taken: Mapping[RequestSeries, Sequence[Sample]]) -> Row:
    """Count texts equal to those of `ar` with the same seeds, for a mode that promises it; `taken`: of one profile."""
    variant = series.variant
    if variant.mode != "ar-speculative":
        return {}
    # with the same codec, since int8 gives a different text
    plain = ModeVariant("ar").having(codec=variant.get("codec"), temperature=variant.get("temperature"))
    ar_texts, own_texts = (
        {s.number: s.account["output_hex"] for s in taken.get(each, ()) if s.account}
        for each in (replace(series, variant=plain), series)
    )
    both = ar_texts.keys() & own_texts.keys()
    same = sum(ar_texts[number] == own_texts[number] for number in both)
    return {"same_as_ar": same, "compared": len(both)} if both else {}


def length_of(row: Row) -> str:
    """The output length that was requested."""
    return f"{row['length']} {row['unit']}"


WAN: tuple[Column[Row], ...] = (
    *map(text_column, ("profile", "text", "mode")),
    ("length", length_of),
    number_column("first s", "first_byte_ms", 3, scale=1e-3),
    number_column("p50 s", "p50_ms", 3, scale=1e-3),
    number_column("floor s", "floor_ms", 3, scale=1e-3),
    number_column("x floor", "ratio", 3),
    number_column("sweeps", "sweeps", 0),
    number_column("tokens/s", "tokens_per_s"),
    number_column("accepted", "acceptance", 2),
    number_column("wire bytes", "wire_bytes", 0),
    number_column("host-s", "host_seconds", 2),
    ("as ar", lambda row: "-" if row["compared"] is None else f"{row['same_as_ar']} of {row['compared']}"),
    *LOCAL_COLUMNS,
    text_column("failed", "failures"),
)

# For machines that joined.
LINKED: tuple[Column[Row], ...] = (
    text_column("links", "links"),
    number_column("ms/hop", "hop_ms", 2),
    number_column("x direct", "over_direct", 3),
)

# For pictures: no metrics of texts, but a picture's compute on the hosts.
PICTURES: tuple[Column[Row], ...] = (
    *map(text_column, ("profile", "mode")),
    number_column("levels", "length", 0),
    number_column("p50 s", "p50_ms", 3, scale=1e-3),
    number_column("p95 s", "p95_ms", 3, scale=1e-3),
    number_column("floor s", "floor_ms", 3, scale=1e-3),
    number_column("x floor", "ratio", 3),
    number_column("trips", "sweeps", 0),
    number_column("hops", "hops", 0),
    number_column("largest hop", "largest_hop_bytes", 0),
    number_column("wire bytes", "wire_bytes", 0),
    number_column("host ms/picture", "host_seconds", 1, scale=1e3),
    text_column("failed", "failures"),
)


def wan_table(rows: Sequence[Row]) -> str:
    """The table for a terminal, with the reasons for failures below."""
    draws = any(row["unit"] == LEVELS for row in rows)  # a bundle either generates text or draws
    failures = [
        f"{row['profile']}, {row['text']}, {row['mode']}, {length_of(row)}: "
        f"{row['failures']} of {row['requests']} failed, for example: {row['error']}"
        for row in rows
        if row["failures"]
    ]
    linked = LINKED if any(row["links"] for row in rows) else ()
    return "\n".join([table((*linked, *(PICTURES if draws else WAN)), rows), *failures])
