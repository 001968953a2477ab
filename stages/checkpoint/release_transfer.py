"""Transfer of a release between machines: the sender offers it and sends the files that the receiver lacks."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from stages.checkpoint.manifest import read_manifest
from stages.checkpoint.release_store import (
    FOLDERS,
    MAX_SIGNATURES,
    IncomingRelease,
    ReleaseManifest,
    ReleaseStore,
    Wants,
)
from stages.errors import CheckpointError, InputError, OnesweepError, StalePart, quoted, regular
from stages.threads import in_thread
from stages.v1 import stage_pb2
from stages.wire.status import StatusError, data_loss, failed_precondition, internal, invalid

PIECE_BYTES = 256 << 10
STOP_S = 5.0

Progress = Callable[[str, int], object]  # called with each file sent, and its size


class ReleaseTransfer:
    """The sender's side of one transfer."""

    def __init__(
        self,
        contents: ReleaseManifest,
        progress: Progress | None = None,
        assignment: stage_pb2.Assignment | None = None,
    ) -> None:
        """:param contents: a release on this machine, with its directories.
        :param assignment: the stage of a host that was started without a checkpoint.
        """
        self.contents, self._progress, self._assignment = contents, progress, assignment
        # The file error of this machine that ended the transfer early.
        self.failure: CheckpointError | None = None
        self.sent_bytes, self._stopped = 0, False
        self._wanted: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    async def requests(self) -> AsyncIterator[stage_pb2.StoreRequest]:
        """An offer, then the files that the receiver asked for, up to the first unreadable one."""
        offer = offer_of(self.contents)
        if self._assignment is not None:
            offer.assignment.CopyFrom(self._assignment)
        yield stage_pb2.StoreRequest(offer=offer)
        try:
            for wanted in await self._wanted:
                if self._stopped:
                    return
                rest = re.fullmatch("(.+)@([0-9]{1,18})", wanted)
                path, start = (rest[1], int(rest[2])) if rest else (wanted, 0)
                source = regular(self._source(path))
                if self._progress:
                    self._progress(path, source.stat().st_size - start)
                with source.open("rb") as file:
                    file.seek(start)
                    while not self._stopped and (data := await asyncio.to_thread(file.read, PIECE_BYTES)):
                        self.sent_bytes += len(data)
                        yield stage_pb2.StoreRequest(piece=stage_pb2.Piece(path=wanted, data=data))
        except CheckpointError as error:
            self.failure = error
        except OSError as error:
            self.failure = CheckpointError(f"cannot read {error.filename}: {error.strerror}")

    def on_response(self, response: stage_pb2.StoreResponse) -> None:
        """Process the receiver's answer."""
        if response.refused:
            self.close()
        elif not self._wanted.done():
            self._wanted.set_result(list(response.wanted))

    def close(self) -> None:
        """Stop sending: gRPC does not end the request stream of a call that has ended."""
        self._stopped = True
        if not self._wanted.done():
            self._wanted.set_result([])

    def _source(self, path: str) -> Path:
        """The file at a path of the release. Raises CheckpointError for any other file."""
        folder, _, name = path.partition("/")
        directory = self.contents.directories.get(folder)
        known = name.endswith(".safetensors") or (directory is not None and name in read_manifest(directory).files)
        if directory is None or "/" in name or not known:
            raise CheckpointError(f"{path[:80]!r} is not a file of this release")
        return directory / name


async def receive_release(
    store: ReleaseStore, requests: AsyncIterator[stage_pb2.StoreRequest], wants_of: Callable[[stage_pb2.Offer], Wants]
) -> AsyncIterator[stage_pb2.StoreResponse]:
    """Answer a transfer; the last answer confirms that the release is stored. Raises StatusError."""
    intake: IncomingRelease | None = None
    try:
        async for request in requests:
            if request.WhichOneof("step") == "offer":
                if intake is not None:
                    raise invalid("a transfer can have only one offer")
                intake = await in_thread(store.begin, manifest_of(request.offer), wants_of(request.offer))
                yield stage_pb2.StoreResponse(wanted=intake.requests)
            elif intake is None:
                raise invalid("a transfer must begin with an offer")
            else:
                await in_thread(intake.write, request.piece.path, request.piece.data)
        if intake is None:
            raise invalid("a transfer must begin with an offer")
        await in_thread(intake.finish)
    except OnesweepError as error:
        raise transfer_error(error) from None
    yield stage_pb2.StoreResponse(stored=True)


async def drain_requests(requests: AsyncIterator[object]) -> None:
    """Read requests until the other side stops, as it does after a refusal.

    If a call ends before its requests do, gRPC replaces the refusal by its own error on the other side.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            async for _ in requests:
                pass


def offer_of(contents: ReleaseManifest) -> stage_pb2.Offer:
    manifests = [stage_pb2.ManifestFile(folder=name, content=raw) for name, raw in contents.manifests.items()]
    offer = stage_pb2.Offer(release=contents.name, manifests=manifests, frontier=contents.frontier)
    offer.signatures.extend(stage_pb2.Signature(key=key, signature=made) for key, made in contents.signatures)
    return offer


def manifest_of(offer: stage_pb2.Offer) -> ReleaseManifest:
    """The release in an offer. Raises StatusError for a bad offer."""
    manifests = {each.folder: each.content for each in offer.manifests}
    signatures = tuple((each.key, each.signature) for each in offer.signatures[:MAX_SIGNATURES])
    contents = ReleaseManifest(manifests, offer.frontier, signatures)
    if len(offer.manifests) > len(FOLDERS) or contents.name != offer.release:
        raise invalid(f"release {quoted(offer.release)} is not named after its manifests")
    return contents


def transfer_error(error: OnesweepError) -> StatusError:
    """The status of a failed transfer: FAILED_PRECONDITION for bad files, INTERNAL for this machine, DATA_LOSS for a
    partial file that was damaged here, without which the next try can succeed."""
    if isinstance(error, StalePart):
        return data_loss(str(error))
    if isinstance(error, CheckpointError | InputError):
        return failed_precondition(str(error))
    return internal(str(error))
