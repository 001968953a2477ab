"""Hosts that are started without a checkpoint get a stage, serve it, and keep it after a restart."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from serving.cli.ports import free_port_block
from serving.router.host_link import HostLink
from serving.router.rollout import send
from serving.router.topology import HostEntry
from stages.checkpoint.release_store import read_release_manifest
from stages.checkpoint.release_transfer import ReleaseTransfer
from stages.v1 import stage_pb2, stage_pb2_grpc
from stages.wire.channel import open_blocking_channel, open_channel
from tests.conftest import PATIENCE_S, eventually, refused, until

pytestmark = pytest.mark.slow

WITHIN_S = 120.0
CUT_BYTES = 120_000
# As `onesweep join` runs one, but that this one listens on loopback, in plain text.
EMPTY_HOST = """
import sys
from pathlib import Path
from stages.host.server import EmptyHost
from stages.host.settings import HostSettings, StageSettings
from stages.signals import run_until_signal

listen, releases = sys.argv[1], Path(sys.argv[2])
settings = StageSettings(releases, (), listen, (), HostSettings("empty"), threads=1, releases=releases)
run_until_signal(EmptyHost(settings).run)
"""


@contextlib.contextmanager
def empty_host(address: str, store: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", EMPTY_HOST, address, str(store)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def described(address: str, ready: bool) -> stage_pb2.DescribeResponse:
    """The description of the host, once it is as ready as it should be."""
    with open_blocking_channel(address) as channel:
        stub = stage_pb2_grpc.StageServiceStub(channel)

        def found() -> stage_pb2.DescribeResponse | None:
            with contextlib.suppress(grpc.RpcError):
                info = stub.Describe(stage_pb2.DescribeRequest(), timeout=5, wait_for_ready=True)
                return info if info.ready == ready else None

        return until(found, WITHIN_S)


def give(address: str, checkpoint: Path, blocks: tuple[int, ...]) -> list[str]:
    """Bring a stage to a host; returns the files that it lacked."""

    async def main() -> list[str]:
        contents, sent = read_release_manifest(checkpoint), list[str]()
        assignment = stage_pb2.Assignment(blocks=blocks)
        transfer = ReleaseTransfer(contents, lambda path, _: sent.append(path), assignment)
        async with open_channel(address) as channel:
            stub = stage_pb2_grpc.StageServiceStub(channel)
            async for response in stub.Store(transfer.requests()):
                transfer.on_response(response)
            await stub.Load(stage_pb2.LoadRequest(release=contents.name, assignment=assignment))
        return sent

    return asyncio.run(main())


def test_an_assigned_stage_is_kept_after_a_restart(bundles: Path, tmp_path: Path) -> None:
    address, name = f"127.0.0.1:{free_port_block(1)}", read_release_manifest(bundles / "own").name
    with empty_host(address, tmp_path / "releases"):
        waiting = described(address, ready=False)
        assert waiting.room.memory_bytes > 0
        assert waiting.room.speed > 0
        assert "it is waiting for a stage" in waiting.not_ready_reason
        request = stage_pb2.LoadRequest(release=name, assignment=stage_pb2.Assignment(blocks=[0]))
        with open_blocking_channel(address) as channel:
            load = stage_pb2_grpc.StageServiceStub(channel).Load
            with pytest.raises(grpc.RpcError, match="is not stored on this host: store it first"):
                load(request, timeout=PATIENCE_S)
            with refused(grpc.StatusCode.UNAVAILABLE, "is waiting for a stage"):
                next(stage_pb2_grpc.StageServiceStub(channel).Subscribe(stage_pb2.SubscribeRequest(router="r")))
        assert len(give(address, bundles / "own", (0, 1, 2))) > 0
        info = described(address, ready=True)
        assert ([release.name for release in info.releases], list(info.blocks)) == ([name], [0, 1, 2])
        assert give(address, bundles / "own", (0, 1, 2)) == []
    with empty_host(address, tmp_path / "releases"):
        assert [release.name for release in described(address, ready=True).releases] == [name]


@pytest.mark.parametrize("spoilt", [False, True])
def test_an_interrupted_transfer_resumes_within_the_file(
    bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: bool
) -> None:
    host, proxy = f"127.0.0.1:{free_port_block(1)}", f"127.0.0.1:{free_port_block(1)}"
    monkeypatch.setattr("stages.checkpoint.release_transfer.PIECE_BYTES", 4096)
    passed, store, coming = [0], tmp_path / "releases", ".coming-*/*/*.safetensors"

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(4096):
                if counted and passed[0] < CUT_BYTES <= passed[0] + len(data):
                    # bytes on their way are lost with the connection
                    await eventually(lambda: sum(path.stat().st_size for path in store.glob(coming)) >= CUT_BYTES / 2)
                    for path in store.glob(coming) if spoilt else ():
                        path.write_bytes(bytes(path.stat().st_size))
                    writer.transport.abort()
                passed[0] += len(data) if counted else 0
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others = await asyncio.open_connection(*host.split(":"))
        await asyncio.gather(carry(reader, others[1], True), carry(others[0], writer, False))

    async def main() -> None:
        contents = read_release_manifest(bundles / "own")
        link = HostLink(HostEntry("h", proxy, (0,), proxy), 30.0)
        async with await asyncio.start_server(joined, *proxy.split(":")):
            sent = await send(link, contents, stage_pb2.Assignment(blocks=(0,)))
            await link.relay.close(0)
        sizes = [path.stat().st_size for path in (store / contents.name).rglob("*.safetensors")]
        assert len(sizes) == 2
        assert sum(sizes) > CUT_BYTES
        assert sent >= sum(sizes) + spoilt * CUT_BYTES / 2, "with the bytes that were sent again"
        assert (passed[0] > sum(sizes) + CUT_BYTES * 3 / 4) == spoilt

    with empty_host(host, store):
        described(host, ready=False)
        asyncio.run(main())


def test_a_host_changes_to_another_release(bundles: Path, tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port_block(1)}"
    with empty_host(address, tmp_path / "releases"):
        described(address, ready=False)
        for bundle in ("own", "other"):
            give(address, bundles / bundle, (0, 1, 2))
            name = read_release_manifest(bundles / bundle).name
            until(lambda name=name: [each.name for each in described(address, ready=True).releases] == [name], WITHIN_S)
