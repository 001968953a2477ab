"""How a release gets from machine to machine: one side delivers it, the other takes it in onto its shelf."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc

from stages.aside import in_thread
from stages.bundle import NGRAM_NAME
from stages.contents import FOLDERS, Contents, Wants
from stages.errors import CheckpointError, InputError, OnesweepError
from stages.manifest import Part, read_manifest
from stages.refusal import Refusal, failed_precondition, invalid
from stages.shelf import Intake, Shelf
from stages.v1 import stage_pb2

PIECE_BYTES = 256 << 10
STOP_S = 5.0

Progress = Callable[[str, int], object]
"""Hears of the files that are sent, and of their sizes."""


class Delivery:
    """One delivery of a release that is on this machine: what to send, and what comes back."""

    def __init__(self, contents: Contents, progress: Progress | None = None) -> None:
        """:param contents: with its directories."""
        self.contents, self._progress = contents, progress
        self.failure: CheckpointError | None = None
        """Why the delivery ended too early: a file of this machine."""
        self._stopped = False
        self._wanted: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()

    async def requests(self) -> AsyncIterator[stage_pb2.StoreRequest]:
        """An offer, then the files that were asked for, up to the first that cannot be read."""
        yield stage_pb2.StoreRequest(offer=offer_of(self.contents))
        try:
            for path in await self._wanted:
                if self._stopped:
                    return
                source = self._source(path)
                if self._progress:
                    self._progress(path, source.stat().st_size)
                with source.open("rb") as file:
                    while not self._stopped and (data := await asyncio.to_thread(file.read, PIECE_BYTES)):
                        yield stage_pb2.StoreRequest(piece=stage_pb2.Piece(path=path, data=data))
        except CheckpointError as error:
            self.failure = error
        except OSError as error:
            self.failure = CheckpointError(f"cannot read {error.filename}: {error.strerror}")

    def hear(self, response: stage_pb2.StoreResponse) -> None:
        """Take note of what the other side wants."""
        if response.refused:
            self.close()
        elif not self._wanted.done():
            self._wanted.set_result(list(response.wanted))

    def close(self) -> None:
        """Send nothing more: gRPC does not end the requests of a call that has ended."""
        self._stopped = True
        if not self._wanted.done():
            self._wanted.set_result([])

    def _source(self, path: str) -> Path:
        """The file behind a path of the release; nothing else on this machine can be asked for."""
        if path == NGRAM_NAME and self.contents.ngrams and self.contents.root:
            return self.contents.root / path
        folder, _, name = path.partition("/")
        directory = self.contents.directories.get(folder)
        known = name.endswith(".safetensors") or (directory is not None and name in read_manifest(directory).files)
        if directory is None or "/" in name or not known:
            raise CheckpointError(f"{path[:80]!r} is no file of this release")
        return directory / name


async def take_in(
    shelf: Shelf, requests: AsyncIterator[stage_pb2.StoreRequest], wants: Wants
) -> AsyncIterator[stage_pb2.StoreResponse]:
    """Answer a delivery; the last answer says that the release is on the shelf. Raises Refusal."""
    intake: Intake | None = None
    try:
        async for request in requests:
            if request.WhichOneof("step") == "offer":
                if intake is not None:
                    raise invalid("a delivery has one offer")
                intake = await in_thread(shelf.begin, contents_of(request.offer), wants)
                yield stage_pb2.StoreResponse(wanted=list(intake.wanted))
            elif intake is None:
                raise invalid("a delivery begins with an offer")
            else:
                await in_thread(intake.write, request.piece.path, request.piece.data)
        if intake is None:
            raise invalid("a delivery begins with an offer")
        await in_thread(intake.finish)
    except OnesweepError as error:
        raise refused(error) from None
    yield stage_pb2.StoreResponse(stored=True)


async def run_dry(requests: AsyncIterator[object]) -> None:
    """Return when the other side has stopped sending, as it does when it hears that it is refused.

    A call that ends while its requests are under way ends, for the other side, in an error of its own making.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOP_S):
            async for _ in requests:
                pass


def offer_of(contents: Contents) -> stage_pb2.Offer:
    manifests = [stage_pb2.ManifestFile(folder=name, content=raw) for name, raw in contents.manifests.items()]
    offer = stage_pb2.Offer(release=contents.name, manifests=manifests, frontier=contents.frontier)
    if contents.ngrams is not None:
        offer.ngrams.CopyFrom(stage_pb2.NgramFile(sha256=contents.ngrams.sha256, bytes=contents.ngrams.bytes))
    return offer


def contents_of(offer: stage_pb2.Offer) -> Contents:
    """Raises Refusal for an offer that is none."""
    ngrams = Part(NGRAM_NAME, offer.ngrams.sha256, offer.ngrams.bytes, {}) if offer.HasField("ngrams") else None
    contents = Contents({each.folder: each.content for each in offer.manifests}, offer.frontier, ngrams)
    if len(offer.manifests) > len(FOLDERS) or contents.name != offer.release:
        raise invalid(f"release {offer.release[:40]!r} is not named after its manifests")
    return contents


def refused(error: OnesweepError) -> Refusal:
    """What a caller hears of trouble with a release: its files are wrong, or this machine failed."""
    if isinstance(error, CheckpointError | InputError):
        return failed_precondition(str(error))
    return Refusal(grpc.StatusCode.INTERNAL, str(error))
