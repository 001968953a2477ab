"""Releases that are stored on a stage server, loaded and dropped, and its errors."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from serving.cli.ports import free_port_block
from stages.checkpoint.release_store import ReleaseManifest, ReleaseStore, read_release_manifest
from stages.checkpoint.release_transfer import offer_of
from stages.errors import CheckpointError
from stages.host.server import StageServer
from stages.host.settings import HostSettings, StageSettings
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import open_blocking_channel
from tests.conftest import PATIENCE_S, until

Stub = stage_pb2_grpc.StageServiceStub


@pytest.fixture
def stub_of(bundles: Path, servers: Any) -> Iterator[Callable[..., Stub]]:
    """A host of block 1 of `own`, with this store."""
    channels = []

    def start(store: Path | None) -> Stub:
        address = f"127.0.0.1:{free_port_block(1)}"
        settings = StageSettings(bundles / "own", (1,), address, (), HostSettings("h"), threads=1, releases=store)
        servers.run(StageServer(settings).run)
        channels.append(open_blocking_channel(address))
        stub = Stub(channels[-1])
        until(lambda: not described(stub).releases[0].loading)
        return stub

    yield start
    for channel in channels:
        channel.close()


@pytest.fixture
def stub(stub_of: Callable[..., Stub], tmp_path: Path) -> Stub:
    return stub_of(tmp_path / "releases")


@pytest.fixture
def other(bundles: Path) -> ReleaseManifest:
    return read_release_manifest(bundles / "other")


def described(stub: Stub) -> stage_pb2.DescribeResponse:
    return stub.Describe(stage_pb2.DescribeRequest(), timeout=PATIENCE_S, wait_for_ready=True)


def delivery(contents: ReleaseManifest, wanted: Iterable[str]) -> Iterator[stage_pb2.StoreRequest]:
    yield stage_pb2.StoreRequest(offer=offer_of(contents))
    for path in wanted:
        folder, _, name = path.partition("/")
        data = (contents.directories[folder] / name).read_bytes()
        yield stage_pb2.StoreRequest(piece=stage_pb2.Piece(path=path, data=data))


def of_block_1(contents: ReleaseManifest) -> list[str]:
    names = [f"{folder}/{path.name}" for folder in ("chain", "ar") for path in contents.directories[folder].iterdir()]
    return sorted(name for name in names if "-1-" in name)


def store(stub: Stub, contents: ReleaseManifest) -> bool:
    *_, last = stub.Store(delivery(contents, of_block_1(contents)), timeout=PATIENCE_S)
    return last.stored


def drop(stub: Stub, name: str) -> None:
    stub.Drop(stage_pb2.DropRequest(release=name), timeout=PATIENCE_S)


def load(stub: Stub, name: str, *keep: str) -> None:
    stub.Load(stage_pb2.LoadRequest(release=name, keep=keep), timeout=PATIENCE_S)


def refusal(call: Callable[..., object], *arguments: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)
    return caught.value.code(), caught.value.details()


def test_one_release_is_stored_at_a_time(stub: Stub, other: ReleaseManifest) -> None:
    requests: SimpleQueue[stage_pb2.StoreRequest | None] = SimpleQueue()
    requests.put(stage_pb2.StoreRequest(offer=offer_of(other)))
    first = stub.Store(iter(requests.get, None), timeout=PATIENCE_S)
    assert list(next(first).wanted)
    code, says = refusal(store, stub, other)
    assert code is grpc.StatusCode.ABORTED
    assert says == "another release is being stored: try again when it is done"
    requests.put(None)
    code, says = refusal(list, first)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "ended after 0 of" in says
    assert store(stub, other)


def test_a_release_is_stored_loaded_and_dropped(stub: Stub, other: ReleaseManifest, bundles: Path, monkeypatch) -> None:
    own = read_release_manifest(bundles / "own").name
    code, says = refusal(load, stub, other.name)
    assert (code, f"{other.name!r} is not stored on this host" in says) == (grpc.StatusCode.NOT_FOUND, True)
    assert store(stub, other)
    load(stub, other.name, own)
    assert [release.name for release in described(stub).releases] == [own, other.name]

    def fail(store: ReleaseStore, names: object) -> None:
        raise CheckpointError("cannot save current.json: no space left")

    with monkeypatch.context() as patch:
        patch.setattr(ReleaseStore, "use", fail)
        code, says = refusal(drop, stub, own)
    assert (code, says) == (grpc.StatusCode.FAILED_PRECONDITION, "cannot save current.json: no space left")
    drop(stub, own)
    code, says = refusal(drop, stub, other.name)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "is the only release that h has" in says
