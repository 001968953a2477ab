"""Quality of text: a judge's bits compared with human text, a text's cost, and the frontier file of mode `auto`.

A judge alone prefers an endless phrase, so its bits come with the entropy of the runs of four bytes.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from grpc import StatusCode

from loadtest.commands import BenchReport, origin, settings_record
from loadtest.quality.judge import check_judge, open_judge
from loadtest.report.table import Column, Estimate, number_column, open_meter, percentile, ratio_of_sums, table
from loadtest.workload.caller import Access
from loadtest.workload.testbed import TestbedSettings, check_testbed, open_testbed
from loadtest.workload.texts import LOCAL_COLUMNS, TextNats, local_distance, served_copy, text_nats
from serving.client.client import Client, RequestRefused, Result, RouterError
from serving.client.variants import ModeVariant, parse_variants
from serving.modes import MODES, WITHOUT_HOSTS
from serving.modes.base import DEFAULT_TEMPERATURE
from serving.modes.frontier import CHOOSABLE, Frontier, Option
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.manifest import read_manifest
from stages.clock import monotonic
from stages.errors import InputError
from stages.model.randomness import Purpose, uniforms
from stages.settings import write_destination
from trainer.blocks.data import read_utf8

if TYPE_CHECKING:
    from loadtest.benches import QualitySettings

HUMAN = "human"
GRAM = 4  # bytes: long enough to see repeated pieces, short enough to occur twice in human text


@dataclass(frozen=True)
class QualityRow:
    """Texts of one variant, or the true continuations; costs are means over texts unless stated otherwise."""

    mode: str  # with its settings; `human` for the true continuations
    bits: Estimate  # the judge's bits per byte of the text, given the prompt
    gram_entropy: float  # bits of all runs of four bytes: low for repetitive texts
    sweeps: float | None = None
    seconds: float | None = None  # median latency, with other requests in flight
    host_ms: float | None = None  # compute on all hosts together
    router_ms: float | None = None  # compute on the router that sweeps wait for
    wire_bytes: float | None = None
    nats: float | None = None  # per token, under the model of `ar` at the text's temperature
    entropy: float | None = None  # of that model at the same positions, nats
    excess: Estimate | None = None  # nats minus entropy: about 0 for the model's own texts
    kl_nats: float | None = None  # this and the next, only for modes without hosts: see `local_distance`
    agreement: float | None = None

    def to_record(self) -> dict[str, Any]:
        record = asdict(self)
        for name, key in (("bits", "judge_bits_per_byte"), ("excess", "excess_nats")):
            estimate = record.pop(name) or dict.fromkeys(("value", "low", "high"))
            record |= {key: estimate["value"], f"{key}_low": estimate["low"], f"{key}_high": estimate["high"]}
        return record


def _interval(estimate: Estimate | None) -> str:
    return "-" if estimate is None else f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


COLUMNS: tuple[Column[QualityRow], ...] = (
    ("mode", lambda row: row.mode),
    ("judge bits/byte", lambda row: _interval(row.bits)),
    number_column("4-gram entropy", "gram_entropy", 2),
    number_column("sweeps", "sweeps"),
    number_column("s", "seconds", 3),
    number_column("host ms", "host_ms"),
    number_column("router ms", "router_ms"),
    number_column("wire bytes", "wire_bytes", 0),
    number_column("nats/token", "nats", 3),
    number_column("entropy", "entropy", 3),
    ("excess nats", lambda row: _interval(row.excess)),
    *LOCAL_COLUMNS,
)


def measure_text(settings: QualitySettings) -> BenchReport:
    """Raises OnesweepError."""
    s = settings
    assert s.prompts is not None
    check_judge()
    variants = None if s.modes is None else parse_variants(s.modes, MODES)
    target = TestbedSettings(checkpoint=s.checkpoint)
    check_testbed(target)
    passages = cut_prompts(held_out_documents(s.prompts), s.count, s.prompt_bytes, s.max_bytes, s.seed)
    with open_testbed(target) as testbed:
        if variants is None:
            served_copy(target.bundle)
            variants = tuple(ModeVariant(mode) for mode in testbed.caller.facts().modes if mode in CHOOSABLE)
        with open_meter(desc="generating", total=len(variants) * len(passages), unit="text") as progress:
            results = generate_all(testbed.access, variants, passages, s, progress.update)
    texts = {variant.label: [result.output for result in taken] for variant, taken in results.items()}
    texts[HUMAN] = [passage.continuation for passage in passages]
    judge, prompts = open_judge(), [passage.prompt for passage in passages]
    with open_meter(desc="judging", total=len(texts) * len(passages), unit="text") as progress:
        bits = {label: judge.judge(prompts, outputs, progress.update) for label, outputs in texts.items()}
    taken = {variant.label: found for variant, found in results.items()}
    rows = {label: _row(label, bits[label], outputs, taken.get(label), s.seed) for label, outputs in texts.items()}
    for label, found in taken.items():
        heat = [float(result.sampling.removeprefix("temperature ").partition(",")[0]) for result in found]
        drawn = zip(prompts, texts[label], heat, strict=True)
        rows[label] = _with_nats(rows[label], text_nats(target.bundle, drawn), s.seed)
    for label in (variant.label for variant in results if variant.mode in WITHOUT_HOSTS):
        distance: dict[str, Any] = local_distance(target.bundle, zip(prompts, texts[label], strict=True))
        rows[label] = replace(rows[label], **distance)
    weights = {name: read_manifest(path).digest() for name, path in find_bundle(target.bundle).models.items()}
    if s.write is not None:
        options = [option_of(variant, results[variant], rows[variant.label].bits) for variant in ranked(results, rows)]
        frontier = Frontier(tuple(options), weights, judge.name, rows[HUMAN].bits.value)
        write_destination(s.write, json.dumps(frontier.to_record() | origin(), indent=2) + "\n")
    record = {
        "settings": settings_record(s),
        "judge": judge.name,
        "weights": weights,
        "rows": [row.to_record() for row in rows.values()],
    }
    words = f"{s.count} prompts of {s.prompt_bytes} bytes, {s.max_bytes} bytes each; judge {judge.name}"
    return BenchReport(f"{table(COLUMNS, list(rows.values()))}\n\n{words}", record)


def _row(
    label: str, bits: Sequence[float], outputs: Sequence[bytes], results: Sequence[Result] | None, seed: int
) -> QualityRow:
    found = ratio_of_sums(bits, [len(output) for output in outputs], seed)
    if found is None:
        raise InputError(f"{label} wrote no text to judge")
    if results is None:
        return QualityRow(label, found, gram_entropy(outputs))
    mean = statistics.fmean
    return QualityRow(
        label,
        found,
        gram_entropy(outputs),
        sweeps=mean(result.sweeps for result in results),
        seconds=statistics.median(result.latency_ms for result in results) / 1000,
        host_ms=1000 * mean(result.host_seconds for result in results),
        router_ms=mean(router_ms(result) for result in results),
        wire_bytes=mean(result.wire_bytes_total for result in results),
    )


def _with_nats(row: QualityRow, found: Sequence[TextNats], seed: int) -> QualityRow:
    if not found:
        return row
    nats, entropy, tokens = zip(*found, strict=True)
    excess = ratio_of_sums(np.subtract(nats, entropy).tolist(), tokens, seed)
    return replace(row, nats=sum(nats) / sum(tokens), entropy=sum(entropy) / sum(tokens), excess=excess)


def gram_entropy(outputs: Sequence[bytes]) -> float:
    """Bits of the runs of GRAM bytes over all texts. It grows with their number: compare equal numbers."""
    counts = Counter(output[i : i + GRAM] for output in outputs for i in range(len(output) - GRAM + 1))
    total = counts.total()
    return sum(n / total * math.log2(total / n) for n in counts.values()) if total else 0.0


def router_ms(result: Result) -> float:
    """Compute on the router that sweeps wait for: the drafter's."""
    return max(result.compute_ms - 1000 * result.host_seconds, 0.0)


def ranked(results: dict[ModeVariant, list[Result]], rows: dict[str, QualityRow]) -> list[ModeVariant]:
    """The temperature of each variant whose texts come closest to the variety of human text."""
    # not the one with the best bits: colder texts please a judge cheaply
    human = rows[HUMAN].gram_entropy
    best: dict[ModeVariant, ModeVariant] = {}
    for variant in sorted(results, key=lambda variant: abs(rows[variant.label].gram_entropy - human)):
        best.setdefault(variant.having(temperature=None), variant)
    return [variant for variant in results if variant in best.values()]


def option_of(variant: ModeVariant, results: Sequence[Result], bits: Estimate) -> Option:
    """A frontier entry: a variant with the settings that the router chose for it, its bits and its costs."""
    chosen = variant.having(
        scorer=variant.get("scorer") or next((result.scorer for result in results if result.scorer), None),
        temperature=DEFAULT_TEMPERATURE if variant.get("temperature") is None else variant.get("temperature"),
    )
    if variant.mode == "chunked":
        chosen = chosen.having(chunk=max(result.chunk for result in results) or None)
    sweeps = sorted(result.sweeps for result in results)
    return Option(
        mode=variant.mode,
        settings=chosen.settings,
        bits=bits.value,
        output_tokens=max(round(statistics.fmean(result.output_tokens for result in results)), 1),
        sweeps=statistics.fmean(sweeps),
        sweeps_high=percentile(sweeps, 95) or 0.0,
        host_ms=1000 * statistics.median(result.host_seconds for result in results),
        router_ms=statistics.median(map(router_ms, results)),
        wire_bytes=statistics.fmean(result.wire_bytes_total for result in results),
        bits_low=bits.low,
        bits_high=bits.high,
    )


# Continuations from a router

TIMEOUT_S = 600.0  # per text, for far links and many candidates: a slow text should not end a run of hours
FULL_S = 2.0


def generate_all(
    access: Access,
    variants: Sequence[ModeVariant],
    passages: Sequence[Passage],
    settings: QualitySettings,
    progress: Callable[[int], object],
) -> dict[ModeVariant, list[Result]]:
    """One Result per variant and passage; passage i has the settings' seed + i.

    Raises RequestRefused or RouterError, for the first request that fails.
    """
    in_flight = 1 if settings.write else settings.in_flight
    room = threading.Semaphore(in_flight)

    def one(variant: ModeVariant, number: int) -> Result:
        request = {"prompt": passages[number].prompt, "max_bytes": settings.max_bytes, **variant.request()}
        with room:
            until_s = monotonic() + TIMEOUT_S
            while True:
                try:
                    result = client.generate(**request, seed=settings.seed + number, timeout_s=TIMEOUT_S)
                except (RequestRefused, RouterError) as error:
                    if error.code is not StatusCode.RESOURCE_EXHAUSTED or monotonic() > until_s:
                        raise type(error)(f"{variant.label}: {error}", error.code) from None
                    # hosts lack room for this many at once: when another ends, run one fewer from then on
                    room.acquire(timeout=FULL_S)
                else:
                    progress(1)
                    return result

    with Client(access.router, **access.client_options()) as client, ThreadPoolExecutor(in_flight) as threads:
        # one of each first: a refusal shows at once, not after an hour of other requests
        first = {variant: one(variant, 0) for variant in variants}
        others = range(1, len(passages))
        return {variant: [first[variant], *threads.map(partial(one, variant), others)] for variant in variants}


# Prompts from held-out text, each with its human continuation


def held_out_documents(path: Path) -> list[bytes]:
    """A file, or a folder's `valid.txt` files, else its .txt files, else all of its files.

    Raises InputError for a path without text, and for text that is not UTF-8.
    """
    every = sorted(
        file
        for file in ([path] if path.is_file() else path.rglob("*"))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not every:
        raise InputError(f"no text at {path}: --prompts takes a file or a folder of UTF-8 text")
    chosen = [file for file in every if file.name == "valid.txt"] or [f for f in every if f.suffix == ".txt"] or every
    documents = [read_utf8(file) for file in chosen]
    if not any(document.strip() for document in documents):
        raise InputError(f"{path} is empty: --prompts needs text to cut prompts from")
    return documents


@dataclass(frozen=True)
class Passage:
    """A piece of human text: a prompt and its true continuation, both cut between characters."""

    prompt: bytes
    continuation: bytes


def cut_prompts(
    documents: Sequence[bytes], count: int, prompt_bytes: int, output_bytes: int, seed: int = 0
) -> tuple[Passage, ...]:
    """Cut `count` passages evenly from the text, without overlap and within files.

    The seed shifts them by what remains of a file. Raises InputError for too little text.
    """
    window = prompt_bytes + output_bytes
    slots = list[tuple[bytes, int]]()
    for number, document in enumerate(documents):
        room, spare = divmod(len(document), window)
        shift = min(int(uniforms(seed, Purpose.WINDOWS, 0, 1, 1, number)[0, 0] * (spare + 1)), spare)
        slots += [(document, start) for start in range(shift, shift + room * window, window)]
    if len(slots) < count:
        raise InputError(
            f"the text has room for only {len(slots)} of {count} passages of {window} bytes: "
            "give more text, or a smaller --count or --bytes"
        )
    chosen = np.linspace(0, len(slots), count, endpoint=False).astype(int)
    passages = list[Passage]()
    for document, start in (slots[i] for i in chosen.tolist()):
        text = _whole(document[start : start + window])
        prompt = _whole(text[:prompt_bytes])
        passages.append(Passage(prompt, text[len(prompt) :]))
    return tuple(passages)


def _whole(raw: bytes) -> bytes:
    """The complete characters."""
    return raw.decode(errors="ignore").encode()
