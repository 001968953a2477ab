"""The client side of `onesweep deploy`: sends a release to the router, which delivers it to the hosts."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import grpc

from serving.client.client import AsyncClient, RequestRefused, RouterError
from serving.v1 import router_pb2
from stages.checkpoint.files import file_digest
from stages.checkpoint.release_store import ReleaseManifest, has_size, read_release_manifest, release_files
from stages.checkpoint.release_transfer import ReleaseTransfer
from stages.errors import CheckpointError, InputError

Show = Callable[[str], object]
OpenClient = Callable[[], AsyncClient]
_Progress = AsyncGenerator[router_pb2.DeployProgress, None]
SWITCHED = "some routers may serve the release already: deploy it again"


def read_release(checkpoint: Path) -> ReleaseManifest:
    """The release in a bundle. Raises InputError for a file that does not match its manifest."""
    try:
        contents = read_release_manifest(checkpoint)
        for name, part in release_files(contents.directories, lambda folder, index: True).items():
            folder, _, file = name.partition("/")
            path = contents.directories[folder] / file
            size = path.stat().st_size if path.is_file() else None
            if not has_size(path, part):
                found = "is missing" if size is None else f"has {size} bytes, but its manifest says {part.bytes}"
                raise CheckpointError(f"{path} {found}: fetch it again")
            # the router identifies a release by its manifests, and would not ask for the files of a known one
            if file_digest(path) != part.sha256:
                raise CheckpointError(f"{path} is damaged (its SHA-256 is not the manifest's): fetch it again")
    except CheckpointError as error:
        raise InputError(str(error)) from None
    return contents


# A release goes to the router, not to each host: one address and one token suffice, and the router keeps the files for
# a host that comes back later.
async def deploying(
    open_client: OpenClient, contents: ReleaseManifest, without: Sequence[str], show: Show, timeout_s: float
) -> router_pb2.Switch:
    """Have all routers of a client exchange their weights, or none; `show` gets lines for people. The first router
    tries the release. Raises RequestRefused or RouterError."""
    async with open_client() as client, AsyncExitStack() as calls:
        begun, together = list[tuple[_Progress, ReleaseTransfer, asyncio.Event]](), len(client.addresses) > 1

        async def requests(delivery: ReleaseTransfer, go: asyncio.Event) -> AsyncIterator[router_pb2.DeployRequest]:
            tried = delivery is not begun[0][1]
            async for each in delivery.requests():
                yield router_pb2.DeployRequest(store=each, without=without, together=together, tried=tried)
            yield router_pb2.DeployRequest()
            await go.wait()
            yield router_pb2.DeployRequest()

        for at in range(len(client.addresses)):
            delivery = ReleaseTransfer(contents, lambda path, size: show(f"sending {path} ({size / 1e6:.1f} MB)"))
            stream = client.exchange(requests(delivery, go := asyncio.Event()), timeout_s, at)
            begun.append((await calls.enter_async_context(aclosing(stream)), delivery, go))
            calls.callback(delivery.close)
        # no router switches before all are ready: a failure ends the calls to the others, and they revert
        ready = [await _switch(show, *each) for each in begun]
        for *_, go in begun:
            go.set()
        try:
            return [a if a.release else await _switch(show, *each) for a, each in zip(ready, begun, strict=True)][-1]
        except (RequestRefused, RouterError) as error:
            raise RouterError(f"{error}; {SWITCHED}", error.code) from None


async def roll_back(open_client: OpenClient, show: Show, timeout_s: float) -> router_pb2.Switch:
    """Have all routers of a client return to the previous release. Raises RequestRefused or RouterError."""
    async with open_client() as client:
        for at, address in enumerate(client.addresses):
            show(f"rolling back the router at {address}")
            switch = await _switch(show, client.exchange(None, timeout_s, at))
        return switch


def line_of(switch: router_pb2.Switch) -> str:
    """A line for a terminal about a finished deployment."""
    if not switch.changed:
        return f"release {switch.release} is already served: nothing to do"
    return f"new requests use release {switch.release}; previous: {switch.previous} (onesweep deploy --rollback)"


async def _switch(
    show: Show, stream: _Progress, delivery: ReleaseTransfer | None = None, go: asyncio.Event | None = None
) -> router_pb2.Switch:
    """The result of an exchange; empty for a router that is only prepared. Raises RouterError or InputError."""
    try:
        async for progress in stream:
            match progress.WhichOneof("step"):
                case "switch" | "prepared":
                    return progress.switch
                case "store" if delivery is not None and go is not None:
                    delivery.on_response(progress.store)
                    if progress.store.refused:
                        go.set()  # the router reads our messages to their end
                case "line":
                    show(progress.line)
    except (RouterError, RequestRefused):
        if delivery is not None and delivery.failure:
            raise InputError(str(delivery.failure)) from None
        raise
    raise RouterError("the router closed the stream without a result", grpc.StatusCode.INTERNAL)
