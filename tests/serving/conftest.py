"""A deployment of real processes for the tests that only ask it for text, and one to break."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from serving.cli import main
from serving.client import Client
from serving.deployment import Deployment, temporary_deployment
from serving.ports import free_port_block
from serving.topology import local_topology
from stages.ar import ArModel
from stages.checkpoint import load_ar
from stages.transport import open_blocking_channel
from stages.v1 import stage_pb2, stage_pb2_grpc
from tests.serving.releases import REQUESTS, Texts, answer, composed


@contextmanager
def deployed(checkpoint: Path) -> Iterator[Deployment]:
    topology = local_topology(3, 3, checkpoint, free_port_block(4) + 1)
    with temporary_deployment(topology, checkpoint) as deployment:
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

    A text that leans to the other model has fewer of them. Summed over all 2^24 texts.
    """

    @torch.inference_mode()
    def __init__(self, model: ArModel, other: ArModel, prompt: int, temperature: float) -> None:
        byte = torch.arange(256)
        pairs = torch.cartesian_prod(byte, byte)
        contexts = torch.cat([torch.full((len(pairs), 1), prompt), pairs], dim=1)
        odds, liked = [], []
        for part in contexts.split(2048):
            p, q = ((each(part).double() / temperature).softmax(dim=-1) for each in (model, other))
            odds.append(p.float())
            liked.append(p > q)
        p, self.liked = torch.cat(odds), torch.cat(liked)  # (256 * 256, 3, 256)
        before = p[0, 0, pairs[:, 0]] * p[torch.arange(len(pairs)), 1, pairs[:, 1]]
        third = (before[:, None] * p[:, 2]).double()
        self.odds = torch.zeros(2, 2, 2, dtype=torch.float64)
        for a, b, c in product(range(2), repeat=3):
            chosen = (self._first(pairs[:, 0]) == a) & (self._second(pairs[:, 0], pairs[:, 1]) == b)
            self.odds[a, b, c] = third[chosen][self.liked[chosen, 2] == bool(c)].sum()
        assert float(self.odds.sum()) == pytest.approx(1.0, abs=1e-4)

    def _first(self, a: torch.Tensor) -> torch.Tensor:
        return self.liked[0, 0, a]

    def _second(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.liked[256 * a, 1, b]

    def probability(self, texts: list[bytes]) -> float:
        """That texts of the model are at least as odd as these (chi-square)."""
        a, b, c = torch.tensor([list(text) for text in texts]).unbind(1)
        patterns = 4 * self._first(a).long() + 2 * self._second(a, b).long() + self.liked[256 * a + b, 2, c].long()
        counts = patterns.bincount(minlength=8)
        expected = self.odds.flatten() * len(texts)
        assert float(expected.min()) >= 5, "too few for a chi-square test"
        statistic = ((counts - expected) ** 2 / expected).sum()
        return float(torch.special.gammaincc(torch.tensor(3.5), statistic / 2))


@pytest.fixture(scope="session")
def three_bytes() -> Callable[[Path, Path, bytes, float], ThreeBytes]:
    """Of the model in one directory, against the one in another."""

    @cache
    def of(directory: Path, other: Path, prompt: bytes, temperature: float) -> ThreeBytes:
        return ThreeBytes(load_ar(directory), load_ar(other), prompt[0], temperature)

    return of
