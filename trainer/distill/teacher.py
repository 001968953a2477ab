"""The pipeline that is distilled, in one process, and distances of a drafter from it."""

# Both use the same head over their features, a chunk of positions at a time: the logits of all would fill the memory.

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from stages.checkpoint.checkpoint import load_stage, replace_file
from stages.checkpoint.manifest import read_manifest
from stages.errors import DataError
from stages.memory import require_memory
from stages.model.layers import LayerCache
from stages.model.pipeline import PipelineStage, new_caches
from stages.model.randomness import Purpose, uniforms
from trainer.blocks.data import Corpus, load_corpus, quick_bfloat16
from trainer.blocks.evaluate import spelled
from trainer.distill.settings import DistillSettings

# Logits of a chunk in float32: they stay in a processor's cache; a GPU wants large products.
CHUNK_BYTES, GPU_CHUNK_BYTES = 25 << 20, 2 << 30
DRAFT = 8  # draft tokens in a row, for the mean number that is accepted


@dataclass(frozen=True)
class OutputHead:
    """A model's last matrix."""

    weight: Tensor  # (vocabulary, width), in the type that products are computed in
    bias: Tensor | None = None

    @staticmethod
    def of(stage: PipelineStage) -> OutputHead:
        """That of a pipeline's last stage."""
        assert stage.head is not None
        return OutputHead(stage.head.weight, stage.head.bias)

    def logits(self, features: Tensor) -> Tensor:
        """features: (places, width). Returns (places, vocabulary) float32."""
        return F.linear(features.to(self.weight.dtype), self.weight, self.bias).float()

    def chunks(self, places: int) -> Iterator[slice]:
        most = CHUNK_BYTES if self.weight.is_cpu else GPU_CHUNK_BYTES
        size = max(1, most // (4 * len(self.weight)))
        return (slice(begin, begin + size) for begin in range(0, places, size))


class _Divergence(torch.autograd.Function):
    """Mean KL(teacher || student) in nats; the gradients, from d KL / d logits = q - p, come with the same pass."""

    # Three products with the head are almost half of a step's time, so the gradient does not cost a second pass. The
    # head's Fisher metric needs no logits, but is worse: 3.26 bits where the full KL has 3.01.
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        student: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Tensor,
        head: OutputHead,
    ) -> Tensor:
        own = OutputHead(weight.to(head.weight.dtype), None if bias is None else bias.to(head.weight.dtype))
        gradient, total = torch.empty_like(student), student.new_zeros((), dtype=torch.float32)
        by_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        by_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        for chunk in head.chunks(len(student)):
            log_p = head.logits(teacher[chunk]).log_softmax(-1)
            log_q = own.logits(student[chunk]).log_softmax(-1)
            p = log_p.exp()
            total += log_p.sub_(log_q).mul_(p).sum()
            difference = log_q.exp_().sub_(p).to(own.weight.dtype)
            gradient[chunk] = (difference @ own.weight).to(gradient.dtype)
            if by_weight is not None:
                by_weight += difference.T @ student[chunk].to(difference.dtype)
            if by_bias is not None:
                by_bias += difference.sum(0)
        ctx.save_for_backward(
            *(None if each is None else each / len(student) for each in (gradient, by_weight, by_bias))
        )
        return total / len(student)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        return *(None if each is None else each * outputs[0] for each in ctx.saved_tensors), None, None


def mean_kl(student: Tensor, own: OutputHead, teacher: Tensor, head: OutputHead) -> Tensor:
    """Mean KL(teacher || student) in nats a position, differentiable by `student` and its head.

    student, teacher: features (..., width), each with its model's own width. own: the student's head.
    """
    rows = student.reshape(-1, student.shape[-1]), teacher.reshape(-1, teacher.shape[-1])
    result: Tensor = _Divergence.apply(rows[0], own.weight, own.bias, rows[1], head)
    return result


def distance(student: Tensor, own: OutputHead, teacher: Tensor, head: OutputHead) -> dict[str, float]:
    """Means over the positions of a text: `kl_bits`, `total_variation`, and `accepted` draft tokens of 8 in a row.

    KL(teacher || student), both at temperature 1. Both: (rows, positions, width) features of the same text.
    """
    rows, positions = student.shape[:2]
    kl, stays = torch.empty(rows * positions), torch.empty(rows * positions)
    pairs = ((head, teacher.flatten(0, 1)), (own, student.flatten(0, 1)))
    for chunk in head.chunks(rows * positions):
        log_p, log_q = (each.logits(features[chunk]).log_softmax(-1) for each, features in pairs)
        p = log_p.exp()
        kl[chunk] = (p * (log_p - log_q)).sum(-1).cpu()
        stays[chunk] = torch.minimum(p, log_q.exp()).sum(-1).cpu()
    accepted = run_length(stays.view(rows, positions))
    return {"kl_bits": float(kl.mean()) / math.log(2), "total_variation": 1 - float(stays.mean()), "accepted": accepted}


def run_length(stays: Tensor) -> float:
    """Mean number of draft tokens accepted of DRAFT in a row. stays: (rows, positions), each one's probability.

    At every position where a whole run fits: the sum over k of the product of the first k probabilities (arXiv
    2211.17192, eq. 1, with each position's own probability in place of their mean).
    """
    return float(stays.unfold(1, min(DRAFT, stays.shape[1]), 1).cumprod(-1).sum(-1).mean())


class Teacher:
    """All stages, frozen, in the data type that they compute in."""

    def __init__(self, directory: Path, device: str, bfloat16: bool) -> None:
        """Load the stages, one after the other. Raises CheckpointError. :param bfloat16: where the device is quick."""
        manifest = read_manifest(directory)
        dtype = torch.bfloat16 if bfloat16 and quick_bfloat16(device) else torch.float32
        sizes = [part.bytes if part else 0 for part in manifest.parts]
        share = 0.5 if dtype == torch.bfloat16 else 1.0
        needed = share * sum(sizes) + max(sizes) if device == "cpu" else max(sizes)
        require_memory(int(needed), f"the model in {directory}")
        self.dtype, self.device = dtype, device
        self.stages: list[PipelineStage] = []
        for index in range(manifest.architecture.parts):
            self.stages.append(load_stage(directory, index).to(device=device, dtype=dtype))

    @property
    def head(self) -> OutputHead:
        return OutputHead.of(self.stages[-1])

    def read(self, tokens: Tensor) -> Tensor:
        """The head's input at every position: (rows, positions, width). tokens: (rows, positions) int64."""
        with self._alone():
            return self._features(tokens.to(self.device), None)

    def write(self, prompts: Tensor, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Continue `prompts` (rows, positions) int64 at temperature 1 until there are `length` tokens.

        Returns the texts (rows, length) and the head's input at every position (rows, length, width).
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        head = self.head
        with self._alone():
            caches = self._caches(length, len(prompts))
            text = prompts.to(self.device)
            features = [self._features(text, caches)]
            while text.shape[1] < length:
                probs = head.logits(features[-1][:, -1]).softmax(-1)
                drawn = torch.multinomial(probs, 1, generator=generator)
                text = torch.cat([text, drawn], dim=1)
                features.append(self._features(drawn, caches))
            return text, torch.cat(features, dim=1)

    def _features(self, tokens: Tensor, caches: list[list[LayerCache]] | None) -> Tensor:
        x = tokens
        for i, stage in enumerate(self.stages):
            x = stage.read(x, caches[i] if caches else None)
        norm = self.stages[-1].norm
        assert norm is not None
        features: Tensor = norm(x)
        return features

    def _caches(self, capacity: int, rows: int) -> list[list[LayerCache]]:
        """Empty ones for every stage, as the stages compute."""
        return [
            [
                LayerCache(cache.keys.to(self.dtype), cache.values.to(self.dtype))
                for cache in new_caches(
                    len(stage.layers), stage.architecture, capacity, rows, torch.device(self.device)
                )
            ]
            for stage in self.stages
        ]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Without gradients and autocast, whatever a training step around it has switched on."""
        with torch.no_grad(), torch.autocast(torch.device(self.device).type, enabled=False):
            yield


# Windows in a sample. They are written side by side, which costs little more than one: on a GPU, far more of them.
ROWS, GPU_ROWS = 32, 1024
HELD_OUT_ROWS = 8
FIRST = 2  # samples before the first step: the lens is fitted to them
MAX_DISK_BYTES = 1 << 30
MAX_GPU_BYTES = 4 << 30
SHORTEST_PROMPT = 8


class Samples:
    """Sample n is a pure function of (seed, n), and the batch of step s of (seed, s), so a run can resume anywhere.

    They are on disk, as a processor takes long to make them. A GPU makes one in seconds, and keeps them in its memory.
    """

    def __init__(
        self, teacher: Teacher, corpus: Corpus, settings: DistillSettings, directory: Path, identity: str
    ) -> None:
        """identity: digest of the run; samples that another run left behind are not read."""
        self.teacher, self.corpus, self.settings, self.directory = teacher, corpus, settings, directory
        self.identity, self.oldest = identity, 0
        width = teacher.stages[0].architecture.width
        self.in_memory = torch.device(teacher.device).type != "cpu"
        self.held: dict[int, tuple[Tensor, Tensor]] = {}  # where they are in memory
        self.rows, room = (GPU_ROWS, MAX_GPU_BYTES) if self.in_memory else (ROWS, MAX_DISK_BYTES)
        self.shape = (self.rows, settings.window, width)
        self.kept = max(FIRST, room // (teacher.dtype.itemsize * math.prod(self.shape)))
        directory.mkdir(parents=True, exist_ok=True)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens (sequences, window) int64, and the teacher's features (sequences, window, width)."""
        s = self.settings
        newest = FIRST - 1 + int(step * s.sequences / (s.passes * self.rows))
        oldest = max(0, newest + 1 - self.kept)
        draws = uniforms(s.seed, Purpose.TRAINING, 0, s.sequences, 2, step)
        count = newest + 1 - oldest
        chosen = [(oldest + int(u * count * (1 - 2**-53)), int(v * self.rows) % self.rows) for u, v in draws]
        # The oldest samples make room for new ones.
        for index in range(self.oldest, oldest):
            self._path(index).unlink(missing_ok=True)
            self.held.pop(index, None)
        self.oldest = oldest
        pairs = [self.row(index, row) for index, row in chosen]
        return torch.stack([tokens for tokens, _ in pairs]), torch.stack([features for _, features in pairs])

    def row(self, index: int, row: int) -> tuple[Tensor, Tensor]:
        """One window of a sample, which is made if it is not there."""
        if self.in_memory:
            if index not in self.held:
                self.held[index] = self._made(index)
            tokens, features = self.held[index]
            return tokens[row], features[row]
        path = self._path(index)
        # A sample that is missing or damaged is made again, and then read.
        for _ in range(2):
            try:
                with safe_open(path, framework="pt") as file:
                    tokens, features = (file.get_slice(name) for name in ("symbols", "features"))
                    is_own = (file.metadata() or {}).get("identity") == self.identity
                    if is_own and tuple(features.get_shape()) == self.shape:
                        return tokens[row].long(), features[row]
            except (SafetensorError, OSError, KeyError):
                pass
            tokens, features = self._made(index)
            tensors = {"symbols": tokens.int().cpu(), "features": features.cpu().contiguous()}
            replace_file(path, partial(save_file, tensors, metadata={"identity": self.identity}))
        raise AssertionError(f"{path} was written and cannot be read")

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """All windows of one: (rows, window) int64, (rows, window, width)."""
        pairs = [self.row(index, row) for row in range(self.rows)]
        return torch.stack([tokens for tokens, _ in pairs]), torch.stack([features for _, features in pairs])

    def held_out(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Text that no step reads: `text`, and `written` by the teacher after the beginnings of it.

        Each as tokens (rows, window) and features (rows, window, width), and rows such that windows do not overlap.
        """
        window = self.settings.window
        rows = max(1, min(HELD_OUT_ROWS, len(self.corpus.valid) // window))
        text = self.corpus.valid_batch(rows, window)
        prompts = text[:, : max(window // 8, 2)]
        return {
            "text": (text, torch.cat([self.teacher.read(row[None]) for row in text])),
            "written": self.teacher.write(prompts, window, self.settings.seed),
        }

    def drop(self) -> None:
        """Delete all samples when the run is over."""
        for path in self.directory.glob("*.safetensors"):
            path.unlink(missing_ok=True)
        self.directory.rmdir()

    def _path(self, index: int) -> Path:
        return self.directory / f"sample-{index}.safetensors"

    def _made(self, index: int) -> tuple[Tensor, Tensor]:
        s = self.settings
        is_written, share = uniforms(s.seed, Purpose.WINDOWS, 1, 1, 2, index)[0]
        text = self.corpus.batch(s.seed, index, self.rows, s.window)
        if is_written > s.written:
            text = text.to(self.teacher.device)
            return text, torch.cat([self.teacher.read(part) for part in text.split(s.sequences)])
        longest = max(s.window // 2, SHORTEST_PROMPT)
        prompt = SHORTEST_PROMPT + int(share * (longest - SHORTEST_PROMPT))
        return self.teacher.write(text[:, :prompt], s.window, s.seed + index)


MAX_TEXT_BYTES = 1 << 30


def tokens_corpus(paths: Sequence[Path], directory: Path, window: int) -> Corpus:
    """The files' text in the tokens of the checkpoint in `directory`, training and held-out apart.

    Each path as `load_corpus` takes it, each half at least `window` tokens long. The corpus' tensors are (tokens,)
    int32, or uint8 where tokens are bytes. Raises DataError, CheckpointError for a damaged tokenizer.
    """
    found = [load_corpus(path) for path in paths]
    if not found:
        raise DataError("give some text to distil on, in --text")
    name = ", ".join(corpus.name for corpus in found)
    train, valid = (torch.cat([getattr(corpus, half) for corpus in found]) for half in ("train", "valid"))
    if len(train) + len(valid) > MAX_TEXT_BYTES:
        raise DataError(f"{name}: more than {MAX_TEXT_BYTES >> 20} MB of text; give less of it")
    corpus = spelled(Corpus(name, train, valid), directory, read_manifest(directory))
    corpus.require(window, "window")
    return corpus
