"""The benchmark `leak`: what a host reads of a text from the states that it gets, without the symbols beside them.

Two attackers. One has pairs of texts and states, as the owner of a host has who is a client, too: a linear probe goes
from a state to the embedding of its symbol, or of the next one. The other also has the weights of the layers before:
place by place, it computes the states of the probe's likeliest symbols, and takes the nearest. Both know codec and
noise. Of a chain: what the estimate of a text says of the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onesweep.loadtest.host.benchmark import Benchmark
from onesweep.loadtest.host.settings import LeakSettings
from onesweep.loadtest.report.table import aligned
from onesweep.loadtest.workload.texts import windows_of
from onesweep.serving.modes.base import DEFAULT_STEPS, DEFAULT_TEMPERATURE
from onesweep.stages.backends import TorchBackend, drafting_runner
from onesweep.stages.backends.base import BranchPiece, CleanPiece
from onesweep.stages.backends.sweep import BlockWork, Boundary, SweepPlan, run_unbatched
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.checkpoint import load_chain, load_stage
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError
from onesweep.stages.model.codec import ESTIMATE_LIMIT, FEATURE_LIMIT, StateCodec, codec_named, hidden_codec
from onesweep.stages.model.families import PipelineStage
from onesweep.stages.model.pipeline import new_caches
from onesweep.stages.model.vocabulary import Alphabet

WINDOW = 128  # symbols that are read with empty caches
TESTED = 5  # one window in so many is kept from the probe
RIDGE = 1e-3  # of the mean variance of a state's numbers
TOGETHER = 8  # windows in a pass, and those whose nearest states are looked for
ROWS_AT_ONCE = 128  # against the whole vocabulary
SLOTS, CODEC = 64, "int4"  # of a chain's sweeps, as `sweep` has them by default


@dataclass(frozen=True)
class SymbolShare:
    """A share of symbols, with the half width of its 95 % interval over windows."""

    mean: float
    half: float

    @staticmethod
    def of(hits: Tensor) -> "SymbolShare":
        """hits: (windows, symbols), true or false."""
        shares = hits.double().mean(1)
        return SymbolShare(float(shares.mean()), 1.96 * float(shares.std()) / len(shares) ** 0.5)

    def __str__(self) -> str:
        return f"{100 * self.mean:.1f} ± {100 * self.half:.1f}"


@dataclass(frozen=True)
class LeakRow:
    """One kind of states."""

    model: str  # its folder in a bundle
    layers: int  # that the states went through; of a chain, blocks
    today: bool  # whether a host gets them; else it would if the router kept the layers before
    codec: str
    noise: float  # standard deviation, relative to the root mean square of a state
    probe: SymbolShare | None  # symbols that the probe reads
    nearest: SymbolShare  # symbols that the nearest states give; of a chain, the nearest code
    following: SymbolShare | None  # of the model's own likeliest next symbols, that a probe for them reads
    nats: float | None  # loss of the model where all hosts get states of this codec and noise, a symbol


class LeakBench(Benchmark[LeakSettings, list[LeakRow]]):
    """`onesweep bench leak`: one model of a checkpoint after the other, in this process."""

    @property
    def announcement(self) -> str:
        return f"states of {self.settings.symbols} symbols of {self.settings.text.name} ..."

    def check(self) -> None:
        s, bundle = self.settings, find_bundle(self.settings.checkpoint)
        if not s.text.is_file():
            raise InputError(f"--text {s.text} is not a file")
        for name in s.codecs:
            hidden_codec(name)
        if not all(0 < noise < 100 for noise in s.noises):
            raise InputError("--noise must be above 0 and below 100; states without noise are measured anyway")
        if any(kept < 1 for kept in s.kept):
            raise InputError("--kept must be at least 1: before the first layer, a state is its symbol")
        if not any((bundle.ar, bundle.scorer, bundle.chain)):
            raise InputError(f"{s.checkpoint} has no model that writes text")

    @torch.inference_mode()
    def measure(self) -> list[LeakRow]:
        bundle, rows = find_bundle(self.settings.checkpoint), list[LeakRow]()
        for name, directory in (("ar", bundle.ar), ("scorer", bundle.scorer)):
            if directory is not None:
                rows += PipelineAttack(self.settings, name, directory).rows()
        return rows if bundle.chain is None else [*rows, *chain_rows(self.settings, bundle.chain)]

    def table(self, result: list[LeakRow]) -> str:
        header = ("model", "layers", "today", "codec", "noise", "probe %", "nearest %", "next symbol %", "nats/symbol")
        cells = [
            (
                *(row.model, str(row.layers), "yes" if row.today else "no", row.codec, f"{row.noise:g}"),
                *("" if share is None else str(share) for share in (row.probe, row.nearest, row.following)),
                "" if row.nats is None else f"{row.nats:.3f}",
            )
            for row in result
        ]
        return aligned(header, cells) + "\nEvery host also gets the symbols beside the states: today it reads 100 %."

    def record(self, result: list[LeakRow]) -> dict[str, Any]:
        s = self.settings
        return {"bench": "leak", "symbols": s.symbols, "seed": s.seed, "rows": [asdict(row) for row in result]}


class LinearProbe:
    """Ridge regression from states, scaled to a root mean square of one, to embeddings of symbols, and the spread of
    its errors: the likeliest symbol is the one with the nearest embedding, measured in that spread."""

    def __init__(self, states: Tensor, embedding: Tensor, symbols: Tensor) -> None:
        """states: (..., width); embedding: (vocabulary, width); symbols: (...)."""
        x, y = self._inputs(states), embedding[symbols.flatten()].double()
        square = x.T @ x
        square.diagonal().add_(RIDGE * float(square.diagonal().mean()))
        self.matrix = torch.linalg.solve(square, x.T @ y)
        errors = y - x @ self.matrix
        spread = errors.T @ errors / len(errors)
        spread.diagonal().add_(RIDGE * float(spread.diagonal().mean()) + 1e-12)
        self.whitening = torch.linalg.cholesky(torch.linalg.inv(spread))
        self.embedding = (embedding.double() @ self.whitening).float()

    def likeliest(self, states: Tensor, count: int) -> Tensor:
        """(..., width) -> symbols, the likeliest first: (..., count)."""
        told = (self._inputs(states) @ self.matrix @ self.whitening).float()
        nearest = [torch.cdist(rows, self.embedding).topk(count, largest=False) for rows in told.split(ROWS_AT_ONCE)]
        return torch.cat([each.indices for each in nearest]).unflatten(0, states.shape[:-1])

    @staticmethod
    def _inputs(states: Tensor) -> Tensor:
        rows = states.flatten(0, -2).double()
        return F.pad(F.rms_norm(rows, rows.shape[1:]), (0, 1), value=1.0)


class PipelineAttack:
    """Both attackers on the states of one pipeline. Raises OnesweepError where the text is too short."""

    def __init__(self, settings: LeakSettings, name: str, directory: Path) -> None:
        self.settings, self.name, self.directory = settings, name, directory
        self.architecture = a = read_manifest(directory).text_architecture
        self.windows = _windows(settings, directory, min(WINDOW, a.positions))
        self.tested = torch.arange(len(self.windows)) % TESTED == TESTED - 1
        self.cuts = list(accumulate(a.layers_in(i) for i in range(a.parts)))
        first = load_stage(directory, 0).embedding
        assert first is not None
        self.embedding = first.weight.detach()
        self.symbols = min(settings.candidates, len(self.embedding))

    def rows(self) -> Iterator[LeakRow]:
        """States of every depth, codec and noise."""
        s, learnt = self.settings, ~self.tested
        plain = (hidden_codec("fp32"), 0.0)
        kinds = [(hidden_codec(name), 0.0) for name in s.codecs] + [(plain[0], noise) for noise in s.noises]
        written = {kind: self._written(*kind) for kind in dict.fromkeys([plain, *kinds])}
        exact = written[plain][1]
        for depth in sorted({*self.cuts[:-1], *(kept for kept in s.kept if kept < self.cuts[-1])}):
            states = torch.cat([_read(self._cut(depth), each) for each in self.windows.split(TOGETHER)])
            for codec, noise in kinds:
                got = self._sent(states, codec, noise)
                probe = LinearProbe(got[learnt], self.embedding, self.windows[learnt])
                guesses = probe.likeliest(got[self.tested], self.symbols)
                following = LinearProbe(got[learnt], self.embedding, exact[learnt]).likeliest(got[self.tested], 1)[
                    ..., 0
                ]
                yield LeakRow(
                    *(self.name, depth, depth in self.cuts, codec.name, noise),
                    probe=SymbolShare.of(guesses[..., 0] == self.windows[self.tested]),
                    nearest=SymbolShare.of(self._nearest(depth, got[self.tested], guesses, codec)),
                    following=SymbolShare.of(following == exact[self.tested]),
                    nats=written[codec, noise][0],
                )

    def _cut(self, depth: int) -> list[PipelineStage]:
        """The stages up to this layer, the last of them without those after it."""
        stages, left = [], depth
        for index, layers in enumerate(map(self.architecture.layers_in, range(self.architecture.parts))):
            stage = load_stage(self.directory, index)
            stage.layers = stage.layers[: min(left, layers)]
            stages.append(stage)
            left -= layers
            if left <= 0:
                break
        return stages

    def _written(self, codec: StateCodec, noise: float) -> tuple[float, Tensor]:
        """Loss, nats a symbol, and the likeliest symbol after each, where hosts get such states."""
        stages, nats, likeliest = self._cut(self.cuts[-1]), 0.0, []
        for tokens in self.windows.split(TOGETHER):
            x = stages[0].read(tokens)
            for stage in stages[1:]:
                x = stage.read(self._sent(x, codec, noise))
            logits = torch.stack([stages[-1].next_byte(each[None])[0] for each in x])
            nats += float(F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))
            likeliest.append(logits.argmax(-1))
        return nats / self.windows[:, 1:].numel(), torch.cat(likeliest)

    def _sent(self, states: Tensor, codec: StateCodec, noise: float) -> Tensor:
        """States as a host gets them. states: (windows, symbols, width)."""
        drawn = torch.randn(states.shape, generator=torch.Generator().manual_seed(self.settings.seed))
        size = states.pow(2).mean(-1, keepdim=True).sqrt()
        return codec.round_trip((states + noise * size * drawn).flatten(0, 1), FEATURE_LIMIT).view(states.shape)

    def _nearest(self, depth: int, got: Tensor, guesses: Tensor, codec: StateCodec) -> Tensor:
        """True where the candidate with the nearest state is the symbol, from the second of each window on.

        got: (windows, symbols, width); guesses: (windows, symbols, candidates) -> (some windows, symbols - 1).
        """
        tokens, found = self.windows[self.tested][:TOGETHER], []
        stages = self._cut(depth)
        caches = [[new_caches(len(each.layers), self.architecture, tokens.shape[1]) for _ in tokens] for each in stages]
        parts = list(zip(map(drafting_runner, stages), caches, strict=True))
        chosen = tokens[:, 0]  # the first symbol is known
        for place in range(1, tokens.shape[1]):
            x, y = list(chosen.split(1)), list(guesses[: len(tokens), place, :, None])
            for runner, held in parts:
                x = runner.read([CleanPiece(*each) for each in zip(x, held, strict=True)])
                y = runner.branch([BranchPiece(*each) for each in zip(y, held, strict=True)])
            states = torch.stack([codec.round_trip(each.squeeze(1), FEATURE_LIMIT) for each in y])
            best = (states - got[: len(tokens), place, None]).pow(2).sum(-1).argmin(-1, keepdim=True)
            chosen = guesses[: len(tokens), place].gather(1, best)[:, 0]
            found.append(chosen == tokens[:, place])
        return torch.stack(found, dim=1)


def chain_rows(settings: LeakSettings, directory: Path) -> Iterator[LeakRow]:
    """Symbols of the text that a sweep writes, by the nearest code to the estimate of it that each host sends on."""
    manifest = read_manifest(directory)
    assert manifest.partition is not None
    a, codec, blocks = manifest.own_architecture, codec_named(CODEC), load_chain(directory)
    runners, hits = [TorchBackend().block(block) for block in blocks], dict[int, list[Tensor]]()
    known = min(WINDOW, a.positions - SLOTS)
    windows = _windows(settings, directory, known)
    for number, window in enumerate(windows[TESTED - 1 :: TESTED]):
        plan = SweepPlan(settings.seed + number, known, SLOTS, DEFAULT_STEPS, DEFAULT_TEMPERATURE)
        sent, outcome = list[Tensor](), None
        for index, runner in enumerate(runners):
            caches = new_caches(a.layers_in(index), a, known)
            work = BlockWork(a, index, manifest.partition, caches, plan, codec, window, outcome)
            text = run_unbatched(work, runner)
            if isinstance(text, Boundary):
                outcome = text
                estimate = codec.decode(text.estimate, SLOTS, a.code_dim, ESTIMATE_LIMIT)
                sent.append(torch.cdist(estimate, blocks[index].codes).argmin(1))
        assert isinstance(text, bytes)
        for depth, guess in enumerate(sent, 1):
            hits.setdefault(depth, []).append(guess == Alphabet(a.vocabulary).decode(text))
    for depth, found in hits.items():
        yield LeakRow("chain", depth, True, CODEC, 0.0, None, SymbolShare.of(torch.stack(found)), None, None)


def _read(stages: Sequence[PipelineStage], tokens: Tensor) -> Tensor:
    x = tokens
    for stage in stages:
        x = stage.read(x)
    return x


def _windows(settings: LeakSettings, directory: Path, size: int) -> Tensor:
    """(windows, symbols). Raises InputError for a text that has too few."""
    found = [each for each in windows_of(settings.text, settings.symbols, size, directory) if len(each) == size]
    if len(found) < 2 * TESTED:
        raise InputError(
            f"--text {settings.text} and --symbols {settings.symbols} give {len(found)} windows of {size} symbols, and "
            f"{2 * TESTED} are needed: choose more"
        )
    return torch.tensor(found)
