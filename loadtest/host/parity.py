"""The benchmark `parity`: hosts write what `transformers` writes, and with drafts what they write without."""

import asyncio
import contextlib
import io
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onesweep.loadtest.host.benchmark import RING, Benchmark, ring_of
from onesweep.loadtest.host.settings import ParitySettings
from onesweep.loadtest.report.record import commit, this_machine
from onesweep.loadtest.report.table import aligned
from onesweep.loadtest.workload.pipeline import Pipeline
from onesweep.loadtest.workload.prompts import NOVEL, SENTENCES
from onesweep.loadtest.workload.texts import symbols_of
from onesweep.serving.cli.deployment import temporary_deployment
from onesweep.serving.client.client import AsyncClient, Result
from onesweep.serving.modes.tokenizer import Tokenizer, tokenizer_of
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.draft_head import has_draft_head
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError, OnesweepError
from onesweep.stages.model.llama import LlamaArchitecture
from onesweep.stages.signals import run_interruptible

TOLERANCE = 1e-3  # most that a logit may differ: float32 has some 1e-6 of the largest, and layers add up
TIMEOUT_S = 3600.0


class TransformersReference:
    """One text at a time, read on token by token."""

    def __init__(self, source: Path) -> None:
        """:param source: a Hugging Face folder, or a .gguf file. float32. Raises OnesweepError."""
        try:
            from transformers import AutoModelForCausalLM, logging
        except ImportError as error:
            raise InputError(f"the package transformers does not work here: {error}") from None
        logging.set_verbosity_error()
        file = {"gguf_file": source.name} if source.is_file() else {}
        directory = source.parent if source.is_file() else source
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars
                self._model = AutoModelForCausalLM.from_pretrained(
                    str(directory), **file, local_files_only=True, dtype=torch.float32
                ).eval()
        except Exception as error:  # of any type: the package has none of its own for it
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise OnesweepError(f"transformers cannot read {source}: {reason}") from None
        self._cache: Any = None

    @property
    def vocabulary(self) -> int:
        return int(self._model.config.vocab_size)

    def begin(self) -> None:
        """Forget what was read."""
        self._cache = None

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """Read on; logits (vocabulary,) of what follows."""
        out = self._model(torch.tensor([tokens]), past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        logits: Tensor = out.logits[0, -1]
        return logits


@dataclass(frozen=True)
class PromptFigures:
    """One prompt, and the text that the reference writes after it."""

    prompt: str
    text: str
    hosts_text: str
    same_text: bool  # the hosts wrote the same bytes in as many tokens
    tokens: int
    same_tokens: int  # places at which the pipeline finds the reference's token the likeliest
    largest_difference: float  # of a logit, over all places
    ours_ms: list[float]  # processor time of each step of one token, milliseconds
    theirs_ms: list[float]

    @property
    def holds(self) -> bool:
        return self.same_text and self.same_tokens == self.tokens and self.largest_difference <= TOLERANCE


class SourceParityBench(Benchmark[ParitySettings, list[PromptFigures]]):
    """`onesweep bench parity --source`: an imported model over real hosts writes, greedily, what `transformers` writes.

    Hosts send text, not logits. So the pipeline runs a second time, in this process, beside the reference: there both
    say what follows at every place of the reference's own text.
    """

    @property
    def announcement(self) -> str:
        s = self.settings
        hosts = min(RING, read_manifest(self._directory()).architecture.parts)
        return f"{hosts} hosts write {s.tokens} tokens after each of {s.prompts} prompts ..."

    @property
    def texts(self) -> tuple[str, ...]:
        return NOVEL.texts[: self.settings.prompts]

    def check(self) -> None:
        s = self.settings
        if find_spec("transformers") is None:
            raise InputError("bench parity needs the package transformers: pip install 'onesweep[quality]'")
        directory = self._directory()
        if s.source is None or not s.source.exists():
            raise InputError(f"no model at {s.source}: --source is what was imported, a folder or a .gguf file")
        if not 1 <= s.prompts <= len(NOVEL.texts):
            raise InputError(f"--prompts must be 1 to {len(NOVEL.texts)}, not {s.prompts}")
        spelling = tokenizer_of(directory)
        longest = max(len(symbols_of(spelling, text.encode())) for text in self.texts)
        room = read_manifest(directory).text_architecture.positions - longest
        if not 1 <= s.tokens <= room:
            raise InputError(f"--max-tokens must be 1 to {room}, what the context leaves after the prompt")

    def _directory(self) -> Path:
        """The folder of the AR model. Raises InputError where it was not imported."""
        directory = find_bundle(self.settings.checkpoint).ar
        if directory is None or not isinstance(read_manifest(directory).architecture, LlamaArchitecture):
            raise InputError(
                f"{self.settings.checkpoint} has no imported model: bench parity is for what `onesweep import` makes"
            )
        return directory

    def measure(self) -> list[PromptFigures]:
        s, directory = self.settings, self._directory()
        assert s.source is not None
        torch.set_num_threads(1)  # as a host, and so that processor times compare
        reference, spelling = TransformersReference(s.source), tokenizer_of(directory)
        if reference.vocabulary != spelling.alphabet.size:
            raise InputError(
                f"{s.source} has {reference.vocabulary} tokens, {directory} {spelling.alphabet.size}: "
                "the checkpoint was not imported from it"
            )
        ring = ring_of(s.checkpoint)
        with temporary_deployment(ring, s.checkpoint):
            written = run_interruptible(_written(ring.router, self.texts, s.tokens))
        print("transformers writes, and the pipeline says what it would have written ...", flush=True)
        pipeline = Pipeline(directory)
        return [
            _compare(text, result, s.tokens, reference, pipeline, spelling)
            for text, result in zip(self.texts, written, strict=True)
        ]

    def table(self, result: list[PromptFigures]) -> str:
        """Sentences: how much is the same, and where the two differ."""
        tokens, same = sum(f.tokens for f in result), sum(f.same_tokens for f in result)
        lines = [
            f"{same} of {tokens} tokens are the same, largest difference of a logit "
            f"{max(f.largest_difference for f in result):.1e} (at most {TOLERANCE:.0e}); "
            f"{sum(f.same_text for f in result)} of {len(result)} texts of the hosts are those of transformers"
        ]
        ours, theirs = [ms for f in result for ms in f.ours_ms], [ms for f in result for ms in f.theirs_ms]
        if ours and theirs:
            medians = (statistics.median(ours), statistics.median(theirs))
            lines.append("processor time for a token, median: {:.1f} ms, transformers {:.1f} ms".format(*medians))
        for f in result:
            if not f.holds:
                lines.append(f"not the same: {f.prompt!r}: {f.hosts_text!r}, transformers {f.text!r}")
        return "\n".join(lines)

    def record(self, result: list[PromptFigures]) -> dict[str, Any]:
        return _record(self.settings) | {"holds": self.holds(result), "prompts": [asdict(f) for f in result]}

    def holds(self, result: list[PromptFigures]) -> bool:
        return all(f.holds for f in result)


async def _written(router: str, texts: Sequence[str], tokens: int) -> list[Result]:
    """All at once: what a request writes does not depend on its company."""
    async with AsyncClient(router) as client:
        requests = [
            client.generate(text, mode="ar", max_tokens=tokens, temperature=0.0, timeout_s=TIMEOUT_S) for text in texts
        ]
        return list(await asyncio.gather(*requests))


def _compare(
    prompt: str, result: Result, most: int, reference: TransformersReference, pipeline: Pipeline, spelling: Tokenizer
) -> PromptFigures:
    """The reference writes greedily; the pipeline reads along."""
    before = symbols_of(spelling, prompt.encode())
    # both read the reference's own text: after a first difference free running texts would tell nothing more
    caches = pipeline.open(len(before) + most)
    reference.begin()
    tokens, new, same, largest = list[int](), before, 0, 0.0
    ours_ms, theirs_ms = list[float](), list[float]()
    while len(tokens) < most and not spelling.ends.intersection(tokens):
        their_logits, their_ms = _timed(lambda new=new: reference.read(new))  # type: ignore[misc]
        our_logits, our_ms = _timed(lambda new=new: pipeline.logits(new, caches)[-1])  # type: ignore[misc]
        if tokens:  # the prompt is no step of one token
            ours_ms.append(our_ms)
            theirs_ms.append(their_ms)
        tokens.append(int(their_logits.argmax()))
        same += int(our_logits.argmax()) == tokens[-1]
        largest = max(largest, float((our_logits - their_logits).abs().max()))
        new = tokens[-1:]
    reader = spelling.detokenizer(spelling.alphabet.encode(before))
    text = reader.feed(spelling.alphabet.encode(tokens)) + reader.end()
    return PromptFigures(
        prompt,
        text.decode(errors="replace"),
        result.text,
        result.output == text and result.output_tokens == len(tokens),
        len(tokens),
        same,
        largest,
        ours_ms,
        theirs_ms,
    )


def _timed(read: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """Its logits, and milliseconds of processor time."""
    begin = time.process_time()
    logits = read()
    return logits, (time.process_time() - begin) * 1000


def _record(settings: ParitySettings) -> dict[str, Any]:
    shown = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(settings).items()}
    return {"bench": "parity", "commit": commit(), "machine": asdict(this_machine()), "settings": shown}


TEMPERATURES = (0.0, 0.7, 1.0)
AT_ONCE = 16
# Short, so that most texts end before they are cut, and with places where one symbol is possible and where many are.
SCHEMA = (
    '{"type": "object", "properties": {"kind": {"enum": ["sea", "land"]}, "depth": {"type": "integer"}},'
    ' "required": ["kind", "depth"], "additionalProperties": false}'
)


@dataclass(frozen=True)
class DraftFigures:
    """Requests of one setting beside the same requests in mode `ar`."""

    drafter: str
    temperature: float
    has_schema: bool
    texts: int
    different: list[int]  # numbers of the requests whose text is not that of `ar`
    tokens: int
    sweeps: int
    ar_sweeps: int


class DraftParityBench(Benchmark[ParitySettings, list[DraftFigures]]):
    """`onesweep bench parity` without a source: mode `ar-speculative` writes what mode `ar` writes, to the last byte.

    With every drafter that the checkpoint has, at three temperatures, free and by a JSON schema, many requests at once.
    """

    @property
    def announcement(self) -> str:
        s = self.settings
        return f"{s.prompts} prompts, {s.tokens} tokens each, with {' and '.join(self.drafters)}, beside mode ar ..."

    @property
    def drafters(self) -> tuple[str, ...]:
        bundle = find_bundle(self.settings.checkpoint)
        assert bundle.ar is not None
        found = {
            "hosts": has_draft_head(read_manifest(bundle.ar)),
            "lookup": True,
            "model": bundle.local is not None,
        }
        return tuple(name for name, has in found.items() if has)

    def check(self) -> None:
        s, directory = self.settings, find_bundle(self.settings.checkpoint).ar
        if directory is None:
            raise InputError(f"{s.checkpoint} has no AR model, which bench parity is for")
        if not 1 <= s.prompts <= (most := len(SENTENCES) * len(NOVEL.texts)):
            raise InputError(f"--prompts must be 1 to {most}, not {s.prompts}")
        spelling = tokenizer_of(directory)
        longest = max(len(symbols_of(spelling, _opening(i).encode())) for i in range(s.prompts))
        room = read_manifest(directory).text_architecture.positions - longest
        if not 1 <= s.tokens <= room:
            raise InputError(f"--max-tokens must be 1 to {room}, what the context leaves after the prompt")

    def measure(self) -> list[DraftFigures]:
        with temporary_deployment(ring := ring_of(self.settings.checkpoint), self.settings.checkpoint):
            return run_interruptible(self._compared(ring.router))

    async def _compared(self, router: str) -> list[DraftFigures]:
        figures = []
        async with AsyncClient(router) as client:
            for temperature, schema in product(TEMPERATURES, ("", SCHEMA)):
                expected = await self._texts(client, mode="ar", temperature=temperature, json_schema=schema)
                for drafter in self.drafters:
                    settings = {"mode": "ar-speculative", "drafter": drafter, "temperature": temperature}
                    found = await self._texts(client, **settings, json_schema=schema)
                    pairs = enumerate(zip(found, expected, strict=True))
                    different = [i for i, (a, b) in pairs if a.output != b.output or a.output_tokens != b.output_tokens]
                    tokens, sweeps = (sum(getattr(r, name) for r in found) for name in ("output_tokens", "sweeps"))
                    ar_sweeps = sum(each.sweeps for each in expected)
                    figures.append(
                        DraftFigures(
                            drafter, temperature, bool(schema), len(found), different, tokens, sweeps, ar_sweeps
                        )
                    )
        return figures

    async def _texts(self, client: AsyncClient, **settings: Any) -> list[Result]:  # noqa: ANN401
        """Texts after all prompts, request n with seed n."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> Result:
            async with gate:
                call = settings | {"max_tokens": self.settings.tokens, "seed": number, "timeout_s": TIMEOUT_S}
                return await client.generate(_opening(number), **call)

        return list(await asyncio.gather(*map(one, range(self.settings.prompts))))

    def table(self, result: list[DraftFigures]) -> str:
        header = ("drafter", "temperature", "schema", "texts of ar", "tokens", "trips", "trips of ar")
        rows = [
            (
                *(f.drafter, f"{f.temperature:g}", "yes" if f.has_schema else "no"),
                f"{f.texts - len(f.different)} of {f.texts}",
                *map(str, (f.tokens, f.sweeps, f.ar_sweeps)),
            )
            for f in result
        ]
        lost = [f"not the text of ar: seed {i}, {f.drafter}, {f.temperature:g}" for f in result for i in f.different]
        return "\n".join([aligned(header, rows), *lost])

    def record(self, result: list[DraftFigures]) -> dict[str, Any]:
        return _record(self.settings) | {"holds": self.holds(result), "rows": [asdict(f) for f in result]}

    def holds(self, result: list[DraftFigures]) -> bool:
        return not any(f.different for f in result)


def _opening(number: int) -> str:
    """Prompt of a request: no two of the first 552 are the same."""
    return f"{SENTENCES[number % len(SENTENCES)]} {NOVEL.text(number)}"


def parity_bench(settings: ParitySettings) -> SourceParityBench | DraftParityBench:
    """The benchmark of these settings."""
    return DraftParityBench(settings) if settings.source is None else SourceParityBench(settings)
