"""Expected texts of the load and fault tests, and texts as symbols of a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from loadtest.workload.caller import check_answer
from loadtest.workload.prompts import SeededPrompt
from loadtest.workload.testbed import Testbed
from serving.modes.base import DEFAULT_CHUNK, DEFAULT_STEPS, DEFAULT_TEMPERATURE
from serving.modes.chunked import ChunkedMode
from serving.modes.tokenizer import Tokenizer, read_tokenizers
from stages.backends import DEFAULT_BACKEND, backend_named
from stages.backends.base import CleanPiece
from stages.backends.sweep import BlockWork, SweepPlan, run_unbatched
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.checkpoint import load_ar, load_chain
from stages.checkpoint.manifest import read_manifest
from stages.model.codec import codec_named
from stages.model.layers import LayerCache
from stages.model.pipeline import new_caches
from stages.model.prefill import split_reads
from stages.model.randomness import sample_symbols
from stages.model.samplers import DEFAULT_SAMPLER
from stages.model.vocabulary import BYTES


@dataclass(frozen=True)
class Work:
    """One request with the router's default settings."""

    mode: str
    prompt: bytes
    max_bytes: int
    seed: int


class InProcess:
    """The models of a bundle on one thread. Its texts must be those of any deployment of the bundle."""

    def __init__(self, checkpoint: Path, backend: str = DEFAULT_BACKEND) -> None:
        """Load and gate the weights. Raises CheckpointError."""
        bundle, maker = find_bundle(checkpoint), backend_named(backend)
        chain, ar = (read_manifest(path) if path else None for path in (bundle.chain, bundle.ar))
        self.chain, self.ar = chain, ar
        self.blocks = [maker.block(block) for block in load_chain(bundle.chain)] if bundle.chain else []
        self.stages = [maker.stage(stage) for stage in load_ar(bundle.ar).stages] if bundle.ar else []

    def generate(self, work: Work) -> bytes:
        """The text of one request."""
        if work.mode == "ar":
            return self._pipeline(work)
        return self._chunks(work, work.max_bytes if work.mode == "sweep" else min(DEFAULT_CHUNK, work.max_bytes))

    def _chunks(self, work: Work, chunk: int) -> bytes:
        assert self.chain is not None
        a, capacity = self.chain.byte_architecture, len(work.prompt) + (work.max_bytes - 1) // chunk * chunk
        caches = [new_caches(a.layers, a, capacity) for _ in self.blocks]
        clean, start, text = work.prompt, len(work.prompt), b""
        while len(text) < work.max_bytes:
            slots = min(chunk, work.max_bytes - len(text))
            plan = SweepPlan(work.seed, start, slots, DEFAULT_STEPS, DEFAULT_TEMPERATURE, DEFAULT_SAMPLER)
            clean = self._sweep(caches, plan, clean)
            start, text = start + len(clean), text + clean
        return text

    def _sweep(self, caches: list[list[LayerCache]], plan: SweepPlan, clean: bytes) -> bytes:
        assert self.chain is not None
        assert self.chain.partition is not None
        codec, before = codec_named(ChunkedMode.default_codec), None
        for index, (runner, held) in enumerate(zip(self.blocks, caches, strict=True)):
            a, partition = self.chain.byte_architecture, self.chain.partition
            work = BlockWork(a, index, partition, held, plan, codec, BYTES.decode(clean), before)
            outcome = run_unbatched(work, runner)
            if isinstance(outcome, bytes):
                return outcome
            before = outcome
        raise AssertionError("the last block of a chain returns text")

    def _pipeline(self, work: Work) -> bytes:
        assert self.ar is not None
        a, capacity = self.ar.byte_architecture, len(work.prompt) + work.max_bytes - 1
        caches = [new_caches(a.layers, a, capacity) for _ in self.stages]
        clean, position, text = work.prompt, 0, b""
        while len(text) < work.max_bytes:
            for piece in split_reads(torch.frombuffer(bytearray(clean), dtype=torch.uint8).long()):
                x = piece
                for stage, held in zip(self.stages, caches, strict=True):
                    x = stage.read([CleanPiece(x, held)])[0]
            position += len(clean)
            (logits,) = self.stages[-1].next_byte([x[-1:]])  # of the last position only, as the last host does
            clean = sample_symbols(logits, DEFAULT_TEMPERATURE, work.seed, position)
            text += clean
        return text


# Modes whose texts `InProcess` computes without a deployment, and so without its links, and how: speculation is exact,
# its texts are those of `ar`.
IN_PROCESS = {"sweep": "sweep", "chunked": "chunked", "ar": "ar", "ar-speculative": "ar"}


class Texts:
    """Expected texts, by mode and case. One object serves many runs with the same cases."""

    def __init__(self, target: Testbed, cases: tuple[SeededPrompt, ...], max_bytes: int) -> None:
        self.target, self.cases, self.max_bytes = target, cases, max_bytes
        self._known: dict[tuple[str, int], bytes] = {}
        self._models: InProcess | None = None

    def of(self, mode: str, wanted: Iterable[int]) -> dict[int, bytes]:
        """Texts of the cases with these numbers. Raises OnesweepError."""
        numbers = sorted(set(wanted))
        missing = [number for number in numbers if (mode, number) not in self._known]
        texts = self._compute(mode, missing) if self._computes(mode) else self._ask(mode, missing)
        self._known.update({(mode, number): text for number, text in zip(missing, texts, strict=True)})
        return {number: self._known[mode, number] for number in numbers}

    def source(self, mode: str) -> str:
        """The source of the texts, in words."""
        return "the same models in one process" if self._computes(mode) else "the idle deployment, one at a time"

    def _computes(self, mode: str) -> bool:
        return self.target.checkpoint is not None and mode in IN_PROCESS

    def _compute(self, mode: str, numbers: list[int]) -> list[bytes]:
        if self._models is None:
            assert self.target.checkpoint is not None
            torch.set_num_threads(1)  # as the hosts
            self._models = InProcess(self.target.checkpoint)
        cases = [self.cases[number] for number in numbers]
        return [self._models.generate(Work(IN_PROCESS[mode], c.prompt.encode(), self.max_bytes, c.seed)) for c in cases]

    def _ask(self, mode: str, numbers: list[int]) -> list[bytes]:
        chosen = [self.cases[number] for number in numbers]
        answers = []
        for case in chosen:  # one at a time: batching must not be able to hide a difference
            call = {"prompt": case.prompt, "mode": mode, "max_bytes": self.max_bytes, "seed": case.seed}
            answers += self.target.caller.ask([call])
            check_answer(answers[-1])
        return [bytes.fromhex(answer["account"]["output_hex"]) for answer in answers]


def tokenizer_of(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises OnesweepError where it is missing or damaged."""
    return read_tokenizers(directory).named(read_manifest(directory).digest())


def symbols_of(tokenizer: Tokenizer, prompt: bytes) -> list[int]:
    """A prompt in symbols; it must be UTF-8 where these are tokens."""
    return tokenizer.alphabet.symbols(asyncio.run(tokenizer.encode_text(prompt)))


def continued(tokenizer: Tokenizer, prompt: bytes, output: bytes) -> tuple[list[int], list[int]]:
    """A prompt and what was written after it, each in symbols.

    Only the text is left of the symbols that were written, so it is encoded again: together with the prompt where that
    leaves the prompt's own symbols as they are.
    """
    before, whole = symbols_of(tokenizer, prompt), symbols_of(tokenizer, prompt + output)
    if whole[: len(before)] == before:
        return before, whole[len(before) :]
    return before, tokenizer.alphabet.symbols(tokenizer.encode_piece(output.decode()))
