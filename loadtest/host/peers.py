"""`bench peers`: what a processor makes of a model, by our stages and by llama.cpp, on the same file in turns; with
`--rpc` also over far links, by our modes and llama.cpp's RPC on the same hosts of a lab."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from loadtest.commands import Row, say
from loadtest.lab.profile import ROUTER
from loadtest.workload.prompts import NOVEL
from loadtest.workload.testbed import Network, check_network, default_hosts, deployed, open_network
from stages.backends import Backend
from stages.backends.base import CleanPiece
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.manifest import read_manifest
from stages.errors import InputError, OnesweepError, ServiceError
from stages.memory import with_large_pages
from stages.model.pipeline import new_caches
from stages.wire.channel import parse_address

if TYPE_CHECKING:
    from loadtest.benches import PeerSettings

AT_ONCE = (1, 4, 16)  # requests
MEMORY = "most memory"
FIRST, STEPS = 8, 64  # tokens of a request until every prompt is read, and those that are timed
PROMPT, LONG = 100, 512  # tokens
PEER = "xllamacpp"  # llama.cpp in a wheel
PROFILES = ("links-60", "links-20")
MODES = ("ar", "ar-speculative")
TOKENS = 128  # of each text
RPC = "llama.cpp RPC"
SERVER, CLIENT = "ggml-rpc-server", "llama-bench"  # on each host; on the router, which asks for tokens without a prompt


def figures(spent_s: Callable[[int, int, int], float]) -> dict[str, float]:
    """Tokens a second of one thread's processor time, by what was measured, and the most MEMORY that it took, in MB.

    :param spent_s: processor time by requests at once, tokens of each prompt, tokens that each writes.
    """
    spent_s(1, PROMPT, FIRST)  # kernels load
    found = {}
    for count in AT_ONCE:
        seconds = spent_s(count, PROMPT, FIRST + STEPS) - spent_s(count, PROMPT, FIRST)
        found[f"{count} at once"] = count * STEPS / seconds
    found[f"a prompt of {LONG}"] = LONG / spent_s(1, LONG, 1)
    return found | {MEMORY: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


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
    if settings.rpc is not None:
        if missing := [name for name in (SERVER, CLIENT) if not (settings.rpc / name).is_file()]:
            raise InputError(
                f"{settings.rpc} has no {' and no '.join(missing)}: "
                "build llama.cpp with -DGGML_RPC=ON, and give its build/bin"
            )
        for profile in PROFILES:
            check_network(profile, default_hosts(settings.checkpoint), settings.checkpoint)
    sides: dict[str, Callable[[], dict[str, float]]] = {"onesweep": partial(our_figures, directory)}
    if importlib.util.find_spec(PEER):
        sides["llama.cpp"] = partial(their_figures, settings.source)
    else:
        say(f"llama.cpp is not here, and ours stands alone: pip install {PEER}")
    found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    # a process for each, that neither is measured in memory or beside threads of the other
    os.environ.update(with_large_pages())  # as hosts have them
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as process:
        for turn in range(settings.rounds):
            for name, measure in sides.items():
                say(f"{name}, round {turn + 1} of {settings.rounds} ...")
                try:
                    found[name].append(process.submit(measure).result())
                except BrokenProcessPool:
                    raise OnesweepError(f"{name} ended its process: what it said before is the reason") from None
    rows = [row for what in found["onesweep"][0] for row in _rows(what, found)]
    return rows if settings.rpc is None else rows + measure_links(settings)


def _rows(what: str, found: dict[str, list[dict[str, float]]]) -> list[Row]:
    values = {name: statistics.median(each[what] for each in turns) for name, turns in found.items()}
    unit = "MB" if what == MEMORY else "tokens a processor second"
    rows = [Row(f"{what}: {name}", value, unit) for name, value in values.items()]
    if "llama.cpp" in values:
        rows.append(Row(f"{what}: ours over theirs", values["onesweep"] / values["llama.cpp"], "x"))
    return rows


@torch.inference_mode()
def our_figures(directory: Path) -> dict[str, float]:
    """All stages in this process, one after the other, with the likeliest token written."""
    torch.set_num_threads(1)
    a = read_manifest(directory).text_architecture
    backend = Backend()
    stages = [backend.stage(load_stage(directory, index)) for index in range(a.parts)]

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

    return figures(spent_s)


def their_figures(source: Path) -> dict[str, float]:
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

    return figures(spent_s)


def measure_links(settings: PeerSettings) -> list[Row]:
    """Seconds a token of one request, medians over the rounds. Raises OnesweepError."""
    rows = []
    for profile in PROFILES:
        taken: dict[str, list[float]] = {name: [] for name in (RPC, *MODES)}
        with open_network(profile, default_hosts(settings.checkpoint)) as network:
            for turn in range(settings.rounds):
                say(f"{profile}, round {turn + 1} of {settings.rounds} ...")
                taken[RPC].append(rpc_s(settings, network))
                for mode, seconds in our_s(settings, network, seed=turn).items():
                    taken[mode].append(seconds)
        found = {name: statistics.median(each) for name, each in taken.items()}
        rows += [Row(f"{profile}: {name}", seconds, "s a token") for name, seconds in found.items()]
        rows += [Row(f"{profile}: theirs over {mode}", found[RPC] / found[mode], "x") for mode in MODES]
    return rows


def rpc_s(settings: PeerSettings, network: Network) -> float:
    """A token by llama.cpp, whose layers lie on the hosts: they travel there first, which is not counted."""
    assert settings.rpc is not None
    with contextlib.ExitStack() as stack:
        for node in network.nodes[1:]:
            stack.enter_context(_serving(network, node, settings.rpc))
        hosts = ",".join(map(network.address, network.nodes[1:]))
        asked = ["-m", str(settings.source), "-p", "0", "-n", str(TOKENS), "-r", "1", "-t", "1", "-ngl", "99"]
        command = [str(settings.rpc / CLIENT), "--rpc", hosts, *asked, "-o", "json"]
        done = subprocess.run(network.command(ROUTER, command), capture_output=True, text=True)
    try:
        (measured,) = json.loads(done.stdout)
        return 1 / float(measured["avg_ts"])
    except (ValueError, KeyError, ZeroDivisionError):
        said = " ".join(done.stderr.split())[-300:]
        raise OnesweepError(f"{CLIENT} measured nothing (exit code {done.returncode}): {said}") from None


@contextlib.contextmanager
def _serving(network: Network, node: str, programs: Path) -> Iterator[None]:
    """A server of llama.cpp in a node, listening."""
    host, port = parse_address(network.address(node))
    # by lines, or what it says would stay in its buffer
    command = ["stdbuf", "-oL", str(programs / SERVER), "-H", host, "-p", str(port), "-t", "1"]
    with subprocess.Popen(
        network.command(node, command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if not any("endpoint" in line for line in iter(process.stdout.readline, "")):
                raise ServiceError(f"{SERVER} ended in {node}: start it by hand to see why")
            yield
        finally:
            process.kill()


def our_s(settings: PeerSettings, network: Network, seed: int) -> dict[str, float]:
    """A token of each mode, at temperature 1, with the prompt's trip: more than the peer is asked for."""
    found = {}
    with deployed(network, settings.checkpoint) as testbed:
        for mode in MODES:
            call = {"prompt": NOVEL.text(seed), "mode": mode, "max_tokens": TOKENS, "temperature": 1.0, "seed": seed}
            for _ in range(2):  # the first warms up
                (answer,) = testbed.caller.ask([call])
            if "error" in answer:
                raise OnesweepError(f"{mode}: {answer['error']}")
            found[mode] = answer["latency_ms"] / 1000 / answer["account"]["output_tokens"]
    return found
