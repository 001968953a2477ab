"""Small models for the maths tests, and what hosts hold of them."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from serving.cli.ports import free_port_block
from stages.checkpoint.checkpoint import save_part, save_parts, write_manifest
from stages.checkpoint.gate import PROBE_TEXT
from stages.checkpoint.manifest import MANIFEST_NAME, Manifest
from stages.host.parts import Parts, load_parts
from stages.host.plan import plan_host
from stages.model.architecture import Architecture
from stages.model.block import Block
from stages.model.partition import NoisePartition
from stages.model.pipeline import ArModel
from stages.model.randomness import Codes
from tests.conftest import until
from tests.stages.raw_client import Peer, peer
from tests.stages.slow_runner import Watched

Module = TypeVar("Module", bound=nn.Module)
SMALL = {"parts": 2, "layers": 2, "width": 32, "heads": 2, "context_length": 96, "code_dim": 8, "condition_dim": 16}


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small(**changes: Any) -> Architecture:
    return Architecture(**{**SMALL, **changes})


def shaken(build: Callable[[], Module], seed: int = 0) -> Module:
    """Weights so large that every path through the module shows in its output."""
    torch.manual_seed(seed)
    module = build().eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.add_(0.15 * torch.randn(parameter.shape))
    return module


def make_block(index: int = 0, seed: int = 0, **changes: Any) -> Block:
    a = small(**changes)
    return shaken(lambda: Block(a, index, Codes(0, a.code_dim)), seed + 100 * index)


def make_chain(parts: int = 3, **changes: Any) -> list[Block]:
    return [make_block(i, parts=parts, **changes) for i in range(parts)]


def make_ar(**changes: Any) -> ArModel:
    return shaken(lambda: ArModel(small(**changes)))


@pytest.fixture
def partition() -> NoisePartition:
    return NoisePartition("uniform", (8.0, 1.5, 0.6, 0.2))


# Checkpoints: trained for a moment on the probe text, so that their losses say something
def fit(module: nn.Module, loss: Callable[[], Tensor], steps: int = 40) -> None:
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def block_loss(block: Block) -> Tensor:
    known = torch.tensor([*PROBE_TEXT.encode()])[None, : block.architecture.context_length]
    half = known.shape[1] // 2
    clean, memory = block.read(known)
    prefix = [(keys[:, :, :half], values[:, :, :half]) for keys, values in memory]
    z = block.codes[known[:, half:]] + torch.randn(1, known.shape[1] - half, block.codes.shape[1])
    denoised = block.denoise(z, torch.zeros_like(z), torch.ones(1, 1), prefix, half)
    return F.cross_entropy(block.next_byte(clean)[0, :-1], known[0, 1:]) + F.cross_entropy(denoised[0], known[0, half:])


def write_chain(directory: Path) -> None:
    torch.manual_seed(0)
    a, codes = small(), Codes(0, SMALL["code_dim"])
    training = {"steps": 40, "seed": 0}
    metrics = {"block-0": {"valid_next_byte_nats": 2.5}}
    data = {"name": "probe", "train_bytes": 256}
    partition = NoisePartition("equal_entropy", (8.0, 1.0, 0.2))
    manifest = Manifest("chain", a, (None, None), codes, partition, PROBE_TEXT, 0.02, "bytes", data, training, metrics)
    write_manifest(directory, manifest)
    for index in range(a.parts):
        block = Block(a, index, codes)
        fit(block, lambda block=block: block_loss(block))
        save_part(directory, block.eval())


def write_ar(directory: Path) -> None:
    torch.manual_seed(0)
    model = ArModel(small())
    known = torch.tensor([*PROBE_TEXT.encode()])[None, : small().context_length]
    fit(model, lambda: F.cross_entropy(model(known)[0, :-1], known[0, 1:]), steps=120)
    write_manifest(directory, Manifest("ar", small(), (None, None), probe_text=PROBE_TEXT))
    save_parts(directory, model.eval().stages)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """chain/ and ar/, each of two parts. Not to be changed: `checkpoint` gives copies."""
    root = tmp_path_factory.mktemp("trained")
    write_chain(root / "chain")
    write_ar(root / "ar")
    return root


@pytest.fixture
def checkpoint(trained: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy of one of the trained checkpoints, to be damaged."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(trained / name, tmp_path / name))

    return copy


def edit_manifest(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / MANIFEST_NAME
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def forge(directory: Path, part: int, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Exchange a part's tensors, and make the manifest agree with the new file."""
    (path,) = directory.glob(f"*-{part}-*.safetensors")
    save_file(change(load_file(path)), path)
    digest = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "bytes": path.stat().st_size}
    edit_manifest(directory, lambda record: record["parts"][part].update(digest))


@pytest.fixture
def block() -> Block:
    return make_block(parts=1)


@pytest.fixture
def directory(tmp_path: Path, block: Block) -> Path:
    """A checkpoint of one random block."""
    partition = NoisePartition("uniform", (8.0, 0.2))
    manifest = Manifest("chain", block.architecture, (None,), Codes(0, 8), partition, PROBE_TEXT)
    write_manifest(tmp_path / "chain", manifest)
    save_part(tmp_path / "chain", block)
    return tmp_path / "chain"


# A host's parts, and a host
@pytest.fixture(scope="module")
def whole(bundles: Path) -> Parts:
    """All three parts of both models, as one host holds them."""
    return load_parts(plan_host(bundles / "own", (0, 1, 2)))


@pytest.fixture
def parts(whole: Parts) -> Parts:
    """Watched runners."""
    chain = {i: Watched(runner) for i, runner in whole.runners["chain"].items()}
    pipeline = {i: Watched(stage) for i, stage in whole.runners["ar"].items()}
    return Parts(whole.plan, {**whole.runners, "chain": chain, "ar": pipeline})


@pytest.fixture(scope="module")
def alone(bundles: Path, module_servers: Any) -> Iterator[Peer]:
    """A subscriber of one host that holds all blocks, with memory for a few sessions."""
    address = f"127.0.0.1:{free_port_block(1)}"
    module_servers.stage(bundles / "own", (0, 1, 2), address, None, session_mb=1, name="alone")
    with peer(address) as opened:
        until(lambda: opened.describe().ready)
        opened.subscribe()
        yield opened


@pytest.fixture
def digest(alone: Peer) -> Iterator[str]:
    yield alone.describe().releases[-1].chain.digest
    alone.release("s", "t")


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A session of this test's own: a released one cannot be opened again."""
    return str(abs(hash(request.node.nodeid)))
