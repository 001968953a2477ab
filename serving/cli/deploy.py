"""The client side of `onesweep deploy`: sends a release to the router, which brings it to the hosts."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import grpc

from serving.client.client import AsyncClient, RequestRefused, RouterError
from serving.v1 import router_pb2
from stages.checkpoint.checkpoint import file_digest
from stages.checkpoint.release_store import ReleaseManifest, has_size, read_release_manifest, release_files
from stages.checkpoint.release_transfer import ReleaseTransfer
from stages.errors import CheckpointError, InputError

Show = Callable[[str], object]
OpenClient = Callable[[], AsyncClient]
_Told = AsyncGenerator[router_pb2.DeployProgress, None]


def read_release(checkpoint: Path) -> ReleaseManifest:
    """The release in a bundle. Raises InputError for a file that is not as its manifest says."""
    try:
        contents = read_release_manifest(checkpoint)
        for name, part in release_files(contents.directories, lambda folder, index: True).items():
            folder, _, file = name.partition("/")
            path = contents.directories[folder] / file
            size = path.stat().st_size if path.is_file() else None
            if not has_size(path, part):
                found = "is missing" if size is None else f"has {size} bytes, its manifest says {part.bytes}"
                raise CheckpointError(f"{path} {found}: fetch it again")
            # the router knows a release by its manifests, and would not even ask for the files of one that it has
            if file_digest(path) != part.sha256:
                raise CheckpointError(f"{path} is damaged (its SHA-256 is not the manifest's): fetch it again")
    except CheckpointError as error:
        raise InputError(str(error)) from None
    return contents


# A release goes to the router, not to each host: one address and one token are enough, and the router has the files for
# a host that comes back later.
def deploy(
    open_client: OpenClient, contents: ReleaseManifest, without: Sequence[str], show: Show, timeout_s: float
) -> router_pb2.Switch:
    """Have all routers of a client exchange their weights, or none; `show` gets lines for people. The first one tries
    the release. Raises RequestRefused or RouterError.

    :param open_client: called where an event loop runs.
    """

    async def main() -> router_pb2.Switch:
        async with open_client() as client, AsyncExitStack() as calls:
            begun = list[tuple[_Told, ReleaseTransfer, asyncio.Event]]()

            async def requests(delivery: ReleaseTransfer, go: asyncio.Event) -> AsyncIterator[router_pb2.DeployRequest]:
                tried = delivery is not begun[0][1]
                async for each in delivery.requests():
                    yield router_pb2.DeployRequest(store=each, without=without, together=True, tried=tried)
                yield router_pb2.DeployRequest()
                await go.wait()
                yield router_pb2.DeployRequest()

            for at in range(len(client.addresses)):
                delivery = ReleaseTransfer(contents, lambda path, size: show(f"sending {path} ({size / 1e6:.1f} MB)"))
                told = client.exchange(requests(delivery, go := asyncio.Event()), timeout_s, at)
                begun.append((await calls.enter_async_context(aclosing(told)), delivery, go))
                calls.callback(delivery.close)
            # no router switches before all can: one that fails ends the calls to the others, and they go back
            ready = [await _switch(show, *each) for each in begun]
            for *_, go in begun:
                go.set()
            return [a if a.release else await _switch(show, *each) for a, each in zip(ready, begun, strict=True)][-1]

    return asyncio.run(main())


def roll_back(open_client: OpenClient, show: Show, timeout_s: float) -> router_pb2.Switch:
    """Have all routers of a client use the release before. Raises RequestRefused or RouterError."""

    async def main() -> router_pb2.Switch:
        async with open_client() as client:
            return [await _switch(show, client.exchange(None, timeout_s, at)) for at, _ in enumerate(client.addresses)][
                -1
            ]

    return asyncio.run(main())


def lines_of(switch: router_pb2.Switch) -> list[str]:
    """Lines for a terminal about a finished deployment."""
    if not switch.changed:
        return [f"release {switch.release} is served already: nothing to do"]
    lines = [f"new requests use release {switch.release}; before: {switch.previous} (onesweep deploy --rollback)"]
    for row in record_of(switch)["models"]:
        digests = f"{row['previous_digest'][:12] or '(none)':<12} -> {row['digest'][:12] or '(none)':<12}"
        losses = [
            f"{what} {_figure(row[f'previous_{name}'])} -> {_figure(row[name])}"
            for what, name in (("nats on its probe text", "probe_nats"), ("bits on validation text", "valid_bits"))
            if row[name] is not None or row[f"previous_{name}"] is not None
        ]
        lines.append(f"{row['folder']:<8} {digests}  {'; '.join(losses)}".rstrip())
    return lines


def record_of(switch: router_pb2.Switch) -> dict[str, Any]:
    """The same as a JSON record."""
    names = ("probe_nats", "previous_probe_nats", "measured_nats", "valid_bits", "previous_valid_bits")
    models = []
    for model in switch.models:
        there = {field.name: value for field, value in model.ListFields()}
        digests = {name: there.get(name, "") for name in ("digest", "previous_digest")}
        models.append({"folder": model.folder, **digests, **{name: there.get(name) for name in names}})
    return {"release": switch.release, "previous": switch.previous, "changed": switch.changed, "models": models}


async def _switch(
    show: Show, told: _Told, delivery: ReleaseTransfer | None = None, go: asyncio.Event | None = None
) -> router_pb2.Switch:
    """The result of an exchange; an empty one of a router that is prepared. Raises RouterError or InputError."""
    try:
        async for progress in told:
            match progress.WhichOneof("step"):
                case "switch" | "prepared":
                    return progress.switch
                case "store" if delivery is not None and go is not None:
                    delivery.hear(progress.store)
                    if progress.store.refused:
                        go.set()  # it waits for the end of the requests
                case "line":
                    show(progress.line)
    except (RouterError, RequestRefused):
        if delivery is not None and delivery.failure:
            raise InputError(str(delivery.failure)) from None
        raise
    raise RouterError("the router ended the answer without a result", grpc.StatusCode.INTERNAL)


def _figure(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.3f}"
