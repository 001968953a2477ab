"""`bench peers`: what a processor makes of a model, by our stages and by llama.cpp, on the same file in turns."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loadtest.commands import Row, say
from stages.backends import Backend
from stages.backends.base import CleanPiece
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.manifest import read_manifest
from stages.errors import InputError, OnesweepError
from stages.memory import use_large_pages
from stages.model.pipeline import new_caches

if TYPE_CHECKING:
    from loadtest.host.commands import PeerSettings

AT_ONCE = (1, 4, 16)  # requests
FIRST, STEPS = 8, 64  # tokens of a request until every prompt is read, and those that are timed
PROMPT, LONG = 100, 512  # tokens
PEER = "xllamacpp"  # llama.cpp in a wheel


@dataclass(frozen=True)
class Figures:
    """Tokens a second of one thread's processor time, by what was measured, and the most memory that it took."""

    rates: dict[str, float]
    memory_mb: float

    @classmethod
    def measured(cls, spent_s: Callable[[int, int, int], float]) -> Figures:
        """:param spent_s: processor time by requests at once, tokens of each prompt, tokens that each writes."""
        spent_s(1, PROMPT, FIRST)  # kernels load
        rates = {}
        for count in AT_ONCE:
            seconds = spent_s(count, PROMPT, FIRST + STEPS) - spent_s(count, PROMPT, FIRST)
            rates[f"{count} at once"] = count * STEPS / seconds
        rates[f"a prompt of {LONG}"] = LONG / spent_s(1, LONG, 1)
        return cls(rates, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def measure_peers(settings: PeerSettings) -> list[Row]:
    """Rows of both, and one over the other: medians over the rounds. Raises OnesweepError."""
    directory = find_bundle(settings.checkpoint).ar
    if directory is None:
        raise InputError(f"{settings.checkpoint} has no AR model: make one with `onesweep import {settings.source}`")
    if not settings.source.is_file():
        raise InputError(f"there is no file {settings.source}")
    positions = read_manifest(directory).text_architecture.positions
    if positions <= LONG:
        raise InputError(f"{directory} reads {positions} tokens: measured are prompts of {LONG}")
    sides: dict[str, Callable[[], Figures]] = {"onesweep": partial(our_figures, directory)}
    if importlib.util.find_spec(PEER):
        sides["llama.cpp"] = partial(their_figures, settings.source)
    else:
        say(f"llama.cpp is not here, and ours stands alone: pip install {PEER}")
    found: dict[str, list[Figures]] = {name: [] for name in sides}
    # a process for each, that neither is measured in memory or beside threads of the other
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as process:
        for turn in range(settings.rounds):
            for name, measure in sides.items():
                say(f"{name}, round {turn + 1} of {settings.rounds} ...")
                try:
                    found[name].append(process.submit(measure).result())
                except BrokenProcessPool:
                    raise OnesweepError(f"{name} ended its process: what it said before is the reason") from None
    return [row for what in (*found["onesweep"][0].rates, "") for row in _rows(what, found)]


def _rows(what: str, found: dict[str, list[Figures]]) -> list[Row]:
    """Rows of one measurement; of memory where `what` is empty."""
    values = {
        name: statistics.median(each.rates[what] if what else each.memory_mb for each in turns)
        for name, turns in found.items()
    }
    title, unit = (what, "tokens a processor second") if what else ("most memory", "MB")
    rows = [Row(f"{title}: {name}", value, unit) for name, value in values.items()]
    if "llama.cpp" in values:
        rows.append(Row(f"{title}: ours over theirs", values["onesweep"] / values["llama.cpp"], "x"))
    return rows


@torch.inference_mode()
def our_figures(directory: Path) -> Figures:
    """All stages in this process, one after the other, with the likeliest token written."""
    torch.set_num_threads(1)
    a = read_manifest(directory).text_architecture
    backend = Backend()
    stages = [backend.stage(load_stage(directory, index)) for index in range(a.parts)]
    use_large_pages()  # as hosts do

    def spent_s(count: int, prompt: int, steps: int) -> float:
        room = prompt + steps
        requests = [[new_caches(a.layers_in(part), a, room) for part in range(a.parts)] for _ in range(count)]
        sources = [torch.arange(prompt) % a.vocabulary for _ in requests]
        begin = time.process_time()
        for _ in range(steps):
            for part, stage in enumerate(stages):
                pieces = [CleanPiece(x, caches[part]) for x, caches in zip(sources, requests, strict=True)]
                sources = stage.read(pieces)
            sources = [logits.argmax(-1) for logits in stages[-1].next_byte([x[-1:] for x in sources])]
        return time.process_time() - begin

    return Figures.measured(spent_s)


def their_figures(source: Path) -> Figures:
    """llama.cpp's server with one thread, without HTTP, with the likeliest token written."""
    llama: Any = importlib.import_module(PEER)
    most = max(AT_ONCE)
    settings = llama.CommonParams()
    settings.model.path = str(source)
    settings.n_parallel, settings.n_ctx = most, most * (LONG + FIRST + STEPS)
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.verbosity = 1  # errors alone: it would log each request
    try:
        server = llama.Server(settings)
    except RuntimeError as error:
        raise InputError(f"llama.cpp cannot read {source}: {error}") from None

    def ask(prompt: int, steps: int) -> None:
        request = {"prompt": list(range(prompt)), "n_predict": steps, "temperature": 0, "ignore_eos": True}
        answer = server.handle_completions({**request, "cache_prompt": False})
        if (wrote := answer["usage"]["completion_tokens"]) != steps:
            raise OnesweepError(f"llama.cpp wrote {wrote} tokens of {steps}")

    def spent_s(count: int, prompt: int, steps: int) -> float:
        begin = time.process_time()
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(ask, [prompt] * count, [steps] * count))
        return time.process_time() - begin

    return Figures.measured(spent_s)
