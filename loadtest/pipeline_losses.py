"""What backends and codecs of hidden states cost a pipeline in quality, and what they save in time and memory.

The whole pipeline in one process, each backend in a new one; between stages a codec's round trip, as on the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loadtest.pipeline import Pipeline
from loadtest.spelt import spelled, spelling_of
from loadtest.stage import alone, is_installed, resident, times_of
from loadtest.table import aligned
from stages.allocator import trim
from stages.backends import BACKENDS, DEFAULT_BACKEND, backend_named
from stages.bundle import find_bundle
from stages.codec import Fp32, hidden_codec
from stages.errors import InputError
from stages.manifest import Manifest, read_manifest

EXACT = (DEFAULT_BACKEND, Fp32.name)
WINDOW = 256
"""Symbols that are read from nothing."""
TEXT_BYTES = 8
"""Of text for each symbol, which is more than any tokenizer needs of prose."""
MOST_SYMBOLS = 1 << 20
ROWS = 32
"""Of odds that are compared at once: whole vocabularies in float64."""
PREFIX = 128
"""Positions before the timed step, where the context has room for them."""


@dataclass(frozen=True)
class LossSettings:
    """What `onesweep bench losses` is told."""

    checkpoint: Path
    text: Path
    backends: tuple[str, ...] = BACKENDS
    codecs: tuple[str, ...] = ("fp32", "int8")
    symbols: int = 4096


@dataclass(frozen=True)
class LossRow:
    """One backend with one codec."""

    backend: str
    codec: str
    nats: float
    """Mean cross-entropy, nats a symbol."""
    divergence: float
    """Mean KL(fp32 || codec), nats a symbol: from the odds of the same backend where nothing is rounded on the way."""
    symbol_bytes: int
    """Of hidden states that one symbol sends, where each stage is on a host of its own."""
    step_ms: float
    """Processor time of one symbol's way through all stages and the head: the fastest of many."""
    weights_mb: float
    """What all stages' runners take, embedding and tables included."""


def check_losses(settings: LossSettings) -> None:
    """Raises OnesweepError for what cannot be measured."""
    _manifest(settings.checkpoint)
    if not settings.text.is_file():
        raise InputError(f"--text {settings.text} is not a file")
    if not 2 <= settings.symbols <= MOST_SYMBOLS:
        raise InputError(f"--symbols must be 2 to {MOST_SYMBOLS}, not {settings.symbols}")
    for name in settings.codecs:
        hidden_codec(name)
    for name in settings.backends:
        backend_named(name)


def measure_losses(settings: LossSettings) -> Iterator[LossRow]:
    """One backend after the other, each in a new process. Raises OnesweepError."""
    for backend in settings.backends:
        yield from alone(_measure, settings, backend)


def installed_backends() -> tuple[str, ...]:
    return tuple(filter(is_installed, BACKENDS))


def losses_table(settings: LossSettings, rows: Sequence[LossRow]) -> str:
    exact = {(row.backend, row.codec): row.nats for row in rows}.get(EXACT)
    cells = [
        (
            *(row.backend, row.codec, f"{row.nats:.4f}"),
            "" if exact is None else f"{row.nats - exact:+.4f}",
            f"{row.divergence:.5f}",
            str(row.symbol_bytes),
            *(f"{row.step_ms:.1f}", f"{row.weights_mb:.0f}"),
        )
        for row in rows
    ]
    return "\n".join(
        [
            f"{settings.symbols} symbols of {settings.text.name}, in windows of {WINDOW}; one thread",
            aligned(("backend", "codec", "nats/symbol", "cost", "KL/symbol", "bytes/symbol", "ms/symbol", "MB"), cells),
        ]
    )


def losses_record(settings: LossSettings, rows: Sequence[LossRow]) -> dict[str, Any]:
    """Settings and figures for a JSON file."""
    return {"bench": "losses", "symbols": settings.symbols, "window": WINDOW, "rows": [asdict(row) for row in rows]}


def _measure(settings: LossSettings, backend: str) -> list[LossRow]:
    torch.set_num_threads(1)
    directory, manifest = _manifest(settings.checkpoint)
    windows = _windows(settings, directory, manifest)
    backend_named(backend)  # a library's own memory is not that of weights
    trim()
    before = resident()
    pipeline = Pipeline(directory, backend)
    trim()
    weights_mb = (resident() - before) / 1e6
    nats, divergence = dict.fromkeys(settings.codecs, 0.0), dict.fromkeys(settings.codecs, 0.0)
    for window in windows:
        following, exact = torch.tensor(window[1:]), _logits(pipeline, Fp32.name, window)
        for name in settings.codecs:
            logits = exact if name == Fp32.name else _logits(pipeline, name, window)
            nats[name] += float(F.cross_entropy(logits.double(), following, reduction="sum"))
            divergence[name] += _divergence(exact, logits)
    count, rows = sum(len(window) - 1 for window in windows), []
    for name in settings.codecs:
        pipeline.codec = hidden_codec(name)
        sent = (manifest.architecture.parts - 1) * pipeline.codec.size(1, manifest.architecture.width)
        figures = (nats[name] / count, divergence[name] / count, sent, _step_ms(pipeline), weights_mb)
        rows.append(LossRow(backend, name, *figures))
    return rows


def _logits(pipeline: Pipeline, codec: str, window: list[int]) -> Tensor:
    """Of what follows each symbol but the last: (symbols, vocabulary)."""
    pipeline.codec = hidden_codec(codec)
    return pipeline.logits(window[:-1], pipeline.open(len(window) - 1))


def _divergence(exact: Tensor, logits: Tensor) -> float:
    """Sum over all rows of KL(exact || logits), nats."""
    pairs = zip(exact.split(ROWS), logits.split(ROWS), strict=True)
    odds = ((one.double().log_softmax(-1), other.double().log_softmax(-1)) for one, other in pairs)
    return sum(float((p.exp() * (p - q)).sum()) for p, q in odds)


def _step_ms(pipeline: Pipeline) -> float:
    past = min(PREFIX, pipeline.architecture.positions - 1)
    caches = pipeline.open(past + 1)

    def step() -> None:
        for cache in (cache for held in caches for cache in held):
            cache.length = past
        pipeline.logits([0], caches)

    return 1000 * min(times_of(step))


def _windows(settings: LossSettings, directory: Path, manifest: Manifest) -> list[list[int]]:
    """The text in symbols: windows spread evenly over the file."""
    size = min(WINDOW, settings.symbols, manifest.architecture.positions)
    count, length = settings.symbols // size, size * TEXT_BYTES
    room = max(settings.text.stat().st_size - length, 0)
    spelling, windows = spelling_of(directory), []
    with settings.text.open("rb") as file:
        for i in range(count if room else 1):
            file.seek(i * room // max(count - 1, 1))
            windows.append(spelled(spelling, file.read(length).decode(errors="ignore").encode())[:size])
    if min(map(len, windows)) < 2:
        raise InputError(f"--text {settings.text} is shorter than two symbols; choose another")
    return windows


def _manifest(checkpoint: Path) -> tuple[Path, Manifest]:
    directory = find_bundle(checkpoint).ar
    if directory is None:
        raise InputError(f"{checkpoint} has no AR model, which this bench measures")
    return directory, read_manifest(directory)
