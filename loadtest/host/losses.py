"""The benchmark `losses`: backends and codecs of hidden states, their cost in nats and their savings.

The whole pipeline runs in one process, each backend in a new one, with a codec's round trip between stages as on the
wire.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onesweep.loadtest.host.benchmark import Benchmark
from onesweep.loadtest.host.settings import LossSettings
from onesweep.loadtest.host.stage import alone, is_installed, resident, times_of
from onesweep.loadtest.report.table import aligned
from onesweep.loadtest.workload.pipeline import Pipeline
from onesweep.loadtest.workload.texts import windows_of
from onesweep.stages.backends import BACKENDS, DEFAULT_BACKEND, backend_named
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.manifest import Manifest, read_manifest
from onesweep.stages.errors import InputError
from onesweep.stages.memory import trim
from onesweep.stages.model.codec import Fp32, hidden_codec

EXACT = (DEFAULT_BACKEND, Fp32.name)
WINDOW = 256  # symbols read with empty caches
ROWS = 32  # compared at once: a row is a whole vocabulary in float64
PREFIX = 128  # positions before the timed step, where the context has room for them


@dataclass(frozen=True)
class LossRow:
    """One backend with one codec."""

    backend: str
    codec: str
    nats: float  # mean cross-entropy, nats a symbol
    # Mean KL(fp32 || codec), nats a symbol: from the odds of the same backend where nothing is rounded on the way.
    divergence: float
    symbol_bytes: int  # hidden states that one symbol sends, where each stage is on a host of its own
    step_ms: float  # processor time of one symbol's way through all stages and the head: the fastest of many
    weights_mb: float  # memory of all stages' runners, embedding and tables included


class LossBench(Benchmark[LossSettings, list[LossRow]]):
    """`onesweep bench losses`: one backend after the other, each in a new process."""

    @property
    def announcement(self) -> str:
        return f"{self.settings.symbols} symbols through {', '.join(self.backends)} ..."

    @property
    def backends(self) -> tuple[str, ...]:
        return self.settings.backends or tuple(filter(is_installed, BACKENDS))

    def check(self) -> None:
        s = self.settings
        _manifest(s.checkpoint)
        if not s.text.is_file():
            raise InputError(f"--text {s.text} is not a file")
        for name in s.codecs:
            hidden_codec(name)
        for name in self.backends:
            backend_named(name)

    def measure(self) -> list[LossRow]:
        return [row for backend in self.backends for row in alone(_measure, self.settings, backend)]

    def table(self, result: list[LossRow]) -> str:
        exact = {(row.backend, row.codec): row.nats for row in result}.get(EXACT)
        cells = [
            (
                *(row.backend, row.codec, f"{row.nats:.4f}"),
                "" if exact is None else f"{row.nats - exact:+.4f}",
                *(f"{row.divergence:.5f}", str(row.symbol_bytes), f"{row.step_ms:.1f}", f"{row.weights_mb:.0f}"),
            )
            for row in result
        ]
        header = ("backend", "codec", "nats/symbol", "cost", "KL/symbol", "bytes/symbol", "ms/symbol", "MB")
        s = self.settings
        return f"{s.symbols} symbols of {s.text.name}, in windows of {WINDOW}; one thread\n" + aligned(header, cells)

    def record(self, result: list[LossRow]) -> dict[str, Any]:
        rows = [asdict(row) for row in result]
        return {"bench": "losses", "symbols": self.settings.symbols, "window": WINDOW, "rows": rows}


def _measure(settings: LossSettings, backend: str) -> list[LossRow]:
    torch.set_num_threads(1)
    directory, manifest = _manifest(settings.checkpoint)
    windows = _windows(settings, directory, manifest)
    backend_named(backend)  # a library's own memory is not that of weights
    trim()
    before = resident()
    # this process measures one backend only: memory that another left behind would hide some of this one's
    pipeline = Pipeline(directory, backend)
    trim()
    weights_mb = (resident() - before) / 1e6
    nats, divergence = dict.fromkeys(settings.codecs, 0.0), dict.fromkeys(settings.codecs, 0.0)
    for window in windows:
        following, exact = torch.tensor(window[1:]), _logits(pipeline, Fp32.name, window)
        for name in settings.codecs:
            logits = exact if name == Fp32.name else _logits(pipeline, name, window)  # nothing is rounded there
            nats[name] += float(F.cross_entropy(logits.double(), following, reduction="sum"))
            divergence[name] += _divergence(exact, logits)
    count, rows = sum(len(window) - 1 for window in windows), []
    for name in settings.codecs:
        pipeline.codec = hidden_codec(name)
        sent = (manifest.architecture.parts - 1) * pipeline.codec.size(1, manifest.text_architecture.width)
        figures = (nats[name] / count, divergence[name] / count, sent, _step_ms(pipeline), weights_mb)
        rows.append(LossRow(backend, name, *figures))
    return rows


def _logits(pipeline: Pipeline, codec: str, window: list[int]) -> Tensor:
    """Logits of the symbol after each one but the last: (symbols, vocabulary)."""
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
            cache.length = past  # the same step again, after as many positions
        pipeline.logits([0], caches)

    return 1000 * min(times_of(step))


def _windows(settings: LossSettings, directory: Path, manifest: Manifest) -> list[list[int]]:
    size = min(WINDOW, settings.symbols, manifest.text_architecture.positions)
    windows = windows_of(settings.text, settings.symbols, size, directory)
    if min(map(len, windows)) < 2:
        raise InputError(f"--text {settings.text} is shorter than two symbols; choose another")
    return windows


def _manifest(checkpoint: Path) -> tuple[Path, Manifest]:
    directory = find_bundle(checkpoint).ar
    if directory is None:
        raise InputError(f"{checkpoint} has no AR model, which this bench measures")
    return directory, read_manifest(directory)
