"""The only module of this folder that imports the project's internals: rings, commands, trainings, single hops.

When a module moves or a message changes its layout, this file follows it; the frozen files and the tests stay.
"""

import contextlib
import hashlib
import io
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from serving.cli.__main__ import main
from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.router.topology import Topology, local_topology
from stages.errors import Interrupted
from stages.host.parts import load_parts
from stages.host.plan import ModelKind, plan_host
from stages.host.sessions import SessionStore
from stages.host.validation import parse_hop
from stages.model.codec import CODECS, HIDDEN
from stages.v1 import stage_pb2
from stages.wire.messages import copy_of, put_work, work_of
from tests.conftest import open_servers, wait_ready, write_bundle
from tests.stages.hops import step
from tests.trainer import small
from trainer.blocks import run
from trainer.blocks.config import RoundSettings, TrainingConfig
from trainer.blocks.data import Corpus, load_corpus
from trainer.blocks.train import train_ar, train_blocks, train_scorer
from trainer.rounds.codecs import CODECS as UPDATE_CODECS
from trainer.rounds.simulation import SimulatedWorkers, Simulation
from trainer.rounds.spec import RunSpec

PATIENT_S = 60.0
"""A slow machine must not make a ring do anything twice."""


def machine() -> str:
    """A fingerprint of this machine's arithmetic: digests of floats can be compared where it is the same."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(11)
    x, w = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((48, 128), (128, 128)))
    heads = F.layer_norm(x @ w, (128,)).view(48, 4, 32).transpose(0, 1)[None]
    attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    loss = F.cross_entropy(F.gelu(attended.flatten(1)).view(48, 128) @ w + x.sin() * x.exp(), torch.arange(48))
    loss.backward()
    parts = [attended.detach(), loss.detach(), x.grad, w.grad, (x.detach() / 3).softmax(dim=1)]
    return digest({str(i): part for i, part in enumerate(parts) if part is not None})


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names, shapes and numbers."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


# Serving


@dataclass(frozen=True)
class Ring:
    """A ready ring in this process."""

    topology: Topology
    weights: Path
    client: Client


@contextlib.contextmanager
def weights() -> Iterator[Path]:
    """A bundle with random weights that are always the same, whichever ship."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        yield write_bundle(Path(directory) / "weights", seed=7, besides=("local", "scorer"))


@contextlib.contextmanager
def ring(weights: Path, hosts: int, replicas: int = 1) -> Iterator[Ring]:
    """A bundle on so many hosts of each of so many replicas."""
    topology = local_topology(hosts, 3, weights, free_port_block(hosts * replicas + 1) + 1, replicas)
    with open_servers() as servers:
        # the time decides which prefixes hosts keep, and so the bytes of a later text
        servers.hosts(topology, weights, hop_timeout_s=PATIENT_S, prefix_mb=0)
        servers.router(topology, weights, ring={"hop_timeout_s": PATIENT_S})
        wait_ready(topology.router)
        with Client(topology.router) as client:
            yield Ring(topology, weights, client)


def command(*arguments: object) -> str:
    """The standard output of a command, as it would in a process of its own."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main([str(argument) for argument in arguments])
    assert code == 0, (arguments, code)
    return out.getvalue()


def trip(ring: Ring, kind: str, number: int = 0, **work: Any) -> tuple[list[bytes], dict[str, Any]]:
    """One piece of work from host to host: the state's payload on each hop between them, and what came out."""
    plans = [plan_host(ring.weights, (index,)) for index in range(len(ring.topology.hosts))]
    model: ModelKind = "chain" if kind == "sweep" else work.pop("scorer")
    sampling = stage_pb2.Sampling(seed=7, temperature=0.8)
    hop = stage_pb2.Hop(router="oracle", session=f"{kind}-{number}", left_s=60, capacity=256)
    hop.digest = plans[0].models[model].digest
    if kind == "sweep":
        hop.sweep.CopyFrom(stage_pb2.Sweep(steps=4, sampling=sampling, sampler="stochastic", **work))
    else:
        put_work(hop, step(sampling=sampling, **work))
    payloads, outcome = [], None
    for plan in plans:
        parts = load_parts(plan)
        sessions = SessionStore(1 << 28, lease_s=PATIENT_S)
        session = sessions.open(hop.session, hop.router, model, hop.capacity, parts, 0.0)
        begun = parse_hop(copy_of(hop), plan)
        begun.begin(session, plan.blocks[-1] + 1)
        while begun.outcome is None:
            call = begun.next_op()
            begun.complete(call.compute([call.piece])[0])
        outcome = begun.outcome
        if isinstance(outcome, stage_pb2.Hop):
            hop = outcome
            payloads.append(hop.sweep.estimate if kind == "sweep" else work_of(hop).hidden)
    event = outcome
    assert isinstance(event, stage_pb2.Event)
    found = event.WhichOneof("outcome")
    assert found in ("text", "scores"), event
    if found == "text":
        return payloads, {"text": event.text.hex()}
    return payloads, {"nats": floats(event.scores.nats, "<f8"), "sha256": sha256(event.scores.nats)}


def floats(payload: bytes, dtype: str = "<f4") -> list[float]:
    return [round(float(number), 5) for number in np.frombuffer(payload, dtype=dtype)]


def sha256(payload: bytes) -> str:
    return hashlib.sha256(payload).hexdigest()


# Messages on the wire


def state_payloads() -> dict[str, Any]:
    """Every codec's payload of a fixed matrix: no arithmetic in it depends on the processor."""
    found = {}
    for what, codecs, width in (("estimate", CODECS, 32), ("hidden", HIDDEN, 128)):
        matrix = torch.tensor([((i * 7919) % 2003 - 1001) / 1024 for i in range(24 * width)]).view(24, width)
        for name, codec in codecs.items():
            payload = codec.encode(matrix)
            assert len(payload) == codec.size(24, width)
            found[f"{what} 24 x {width}, {name}"] = {"bytes": len(payload), "payload_sha256": sha256(payload)}
    return found


def update_payloads() -> dict[str, Any]:
    """Every codec's payload of a fixed update in training, and what is read from it."""
    tensors = {
        "a.weight": torch.tensor([((i * 7919) % 2003 - 1001) / 1024 for i in range(48 * 40)]).view(48, 40),
        "bias": torch.tensor([((i * 104729) % 211 - 105) / 64 for i in range(40)]),
        "gain": torch.tensor(0.75),
    }
    found = {}
    for name, codec in UPDATE_CODECS.items():
        payload = codec.encode(tensors)
        read = codec.decode(payload, {key: tuple(tensor.shape) for key, tensor in tensors.items()})
        found[name] = {"bytes": len(payload), "payload_sha256": sha256(payload), "read_sha256": digest(read)}
    return found


# Training


def tiny(**changes: Any) -> TrainingConfig:
    config = replace(small.tiny, steps=12, evaluate_every=25, valid_windows=16, save_every_s=60.0)
    return replace(config, **{"architecture": replace(config.architecture, layers=1), **changes})


def corpus(directory: Path) -> Corpus:
    """12 kB of words in a file there, always the same."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    words, number, text = ["the", "ship", "sailed", "north", "and", "nobody", "saw", "it", "again", "naïve"], 1, []
    for _ in range(2400):
        number = number * 48271 % 2147483647
        text.append(words[number % len(words)])
    path = directory / "words.txt"
    path.write_text(" ".join(text), encoding="utf-8")
    return load_corpus(path)


@contextlib.contextmanager
def stopping_at(task_name: str, done: int) -> Iterator[None]:
    """Asks, as Ctrl-C does, one task to stop when so many of its steps are done."""

    train_step = run.train_step

    def step_of(task: run.Task, optimizers: Any, config: Any, step: int, *rest: Any) -> dict[str, Any]:
        record = train_step(task, optimizers, config, step, *rest)
        if (task.name, step + 1) == (task_name, done):
            signal.raise_signal(signal.SIGINT)
        return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "train_step", step_of)
        yield


def weights_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    norms = [round(float(tensor.double().norm()), 6) for _, tensor in sorted(tensors.items())]
    return {"sha256": digest(tensors), "norms": norms}


def checkpoint_of(directory: Path) -> dict[str, Any]:
    """For every part's file, by its name without the digest."""
    return {path.name.rpartition("-")[0]: weights_of(load_file(path)) for path in directory.glob("*.safetensors")}


def trained(what: str, directory: Path, stop_at: tuple[str, int] | None = None) -> dict[str, Any]:
    """The weights of a training into `directory`, which may be stopped on its way and run again."""
    text, out = corpus(directory), directory / "out"

    def train() -> None:
        if what == "ar":
            train_ar(tiny(), text, out, stages=2)
        elif what == "scorer":
            train_scorer(tiny(), text, out)
        else:
            train_blocks(tiny(), text, out)

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        if stop_at is not None:
            try:
                with stopping_at(*stop_at):
                    train()
            except Interrupted:
                stopped = checkpoint_of(out)
            assert len(stopped) < tiny().architecture.parts
        train()
    return checkpoint_of(out)


def rounds(directory: Path, fleet: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The weights that rounds of virtual workers publish, and what their links carried."""
    text, settings = corpus(directory), {"rounds": 2, "steps_per_round": 2, **settings}
    frame = RunSpec.of(tiny(rounds=RoundSettings(**settings)), text)
    engine = Simulation(frame, text, SimulatedWorkers(**fleet))
    traffic = vars(engine.run())
    traffic["updates"] = dict(sorted(traffic["updates"].items()))
    return {"weights": {name: weights_of(part) for name, part in engine.published().items()}, "traffic": traffic}
