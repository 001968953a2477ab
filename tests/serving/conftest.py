"""A deployment of real processes for the tests that only ask it for text, and one to break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from serving.cli.__main__ import main
from serving.cli.deployment import Deployment, temporary_deployment
from serving.cli.ports import free_port_block
from serving.client.client import Client
from serving.router.topology import local_topology
from stages.checkpoint.checkpoint import load_ar
from stages.model.pipeline import ArModel
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import open_blocking_channel
from tests.serving.releases import REQUESTS, Texts, answer, composed


@contextmanager
def deployed(checkpoint: Path) -> Iterator[Deployment]:
    topology = local_topology(3, 3, checkpoint, free_port_block(4) + 1)
    seldom = ("--keep-warm-ms", "500")  # it is idle for most of the tests, and each message takes time from them
    with temporary_deployment(topology, checkpoint, host_options=seldom, router_options=seldom) as deployment:
        yield deployment


@pytest.fixture(scope="session")
def deployment(bundles: Path) -> Iterator[Deployment]:
    """Three hosts and a router as processes. Not to be harmed."""
    with deployed(bundles / "own") as running:
        yield running


@pytest.fixture(scope="module")
def victim(bundles: Path) -> Iterator[Deployment]:
    """The same, for one module to break and mend."""
    with deployed(bundles / "own") as running:
        yield running


@pytest.fixture
def client(deployment: Deployment) -> Iterator[Client]:
    with Client(deployment.topology.router) as opened:
        yield opened


@pytest.fixture
def describe() -> Callable[[str], stage_pb2.DescribeResponse]:
    """What the host at an address says of itself."""

    def ask(address: str) -> stage_pb2.DescribeResponse:
        with open_blocking_channel(address) as channel:
            return stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest(), timeout=5)

    return ask


@pytest.fixture
def sessions(describe: Callable[[str], stage_pb2.DescribeResponse]) -> Callable[[Deployment], int]:
    """Sessions open on all hosts of a deployment that answer."""

    def count(deployment: Deployment) -> int:
        total = 0
        for host in deployment.topology.hosts:
            try:
                total += describe(host.address).counters.sessions
            except grpc.RpcError:
                continue
        return total

    return count


@pytest.fixture
def onesweep(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return run


# Releases


@pytest.fixture(scope="session")
def old(bundles: Path) -> Path:
    return bundles / "scored"


@pytest.fixture(scope="session")
def new(bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return composed(tmp_path_factory.mktemp("new"), bundles / "other", scorer=bundles / "own" / "ar")


@pytest.fixture(scope="session")
def texts(old: Path, new: Path, local_ring: Callable[..., Any]) -> dict[str, Texts]:
    """What hosts write that have nothing but one release."""
    written = {}
    for name, bundle in (("old", old), ("new", new)):
        with local_ring(bundle, 3) as client:
            written[name] = {key: answer(client, key) for key in REQUESTS}
    assert all(written["old"][key] != written["new"][key] for key in REQUESTS)
    return written


# Whether texts have the odds of a model


class ThreeBytes:
    """Texts of three bytes after a prompt of one, in 8 patterns: which of the bytes a model likes better than another.

    Texts of the other one have other patterns. Summed over all 2^24 texts.
    """

    def __init__(self, model: ArModel, other: ArModel, prompt: int, temperature: float) -> None:
        ours, theirs = (odds_of_bytes(each, prompt, temperature) for each in (model, other))
        self.liked = first, second, third = [p > q for p, q in zip(ours, theirs, strict=True)]
        pairs = 2 * first[:, None].long() + second
        self.odds = []
        for a, b, c in (ours, theirs):
            before, last = (a[:, None] * b).double(), (c * third).sum(dim=2).double()
            parts = [pairs.flatten().bincount((before * x).flatten(), minlength=4) for x in (1 - last, last)]
            self.odds.append(torch.stack(parts, dim=1).flatten())
            assert float(self.odds[-1].sum()) == pytest.approx(1.0, abs=1e-4)

    def probability(self, texts: list[bytes], other: bool = False) -> float:
        """That texts of the model, or of the other one, are at least as odd as these (chi-square)."""
        a, b, c = torch.tensor([list(text) for text in texts]).unbind(1)
        first, second, third = self.liked
        patterns = 4 * first[a].long() + 2 * second[a, b].long() + third[a, b, c].long()
        counts = patterns.bincount(minlength=8)
        expected = self.odds[other] * len(texts)
        assert float(expected.min()) >= 5, "too few for a chi-square test"
        statistic = ((counts - expected) ** 2 / expected).sum()
        return float(torch.special.gammaincc(torch.tensor(3.5), statistic / 2))


@torch.inference_mode()
def odds_of_bytes(model: ArModel, prompt: int, temperature: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a first byte, a second one after each, and a third one after each two: (256,), (256, 256), (256, 256, 256)."""
    byte = torch.arange(256)
    pairs = torch.cartesian_prod(byte, byte)
    contexts = torch.cat([torch.full((len(pairs), 1), prompt), pairs], dim=1)

    def after(texts: torch.Tensor) -> torch.Tensor:
        return (model(texts).double() / temperature).softmax(dim=-1).float()

    early = after(contexts[::256, :2])
    late = torch.cat([after(part)[:, 2] for part in contexts.split(2048)])
    return early[0, 0], early[:, 1], late.view(256, 256, 256)


@pytest.fixture(scope="session")
def three_bytes() -> Callable[[Path, Path, bytes, float], ThreeBytes]:
    """Of the model in one directory, against the one in another."""

    @cache
    def of(directory: Path, other: Path, prompt: bytes, temperature: float) -> ThreeBytes:
        return ThreeBytes(load_ar(directory), load_ar(other), prompt[0], temperature)

    return of
