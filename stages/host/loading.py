"""Loading of weights, at a host's start and while it serves others."""

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from stages.backends import Backend
from stages.backends.base import BlockRunner, BranchPiece, CleanPiece, NoisyPiece, PictureRunner, StageRunner
from stages.backends.rows import ROWS_TOGETHER
from stages.backends.runner_checks import shortened
from stages.checkpoint.release_store import ReleaseStore, has_size, read_release_manifest
from stages.checkpoint.release_transfer import transfer_error
from stages.clock import monotonic
from stages.errors import CheckpointError, OnesweepError, ServiceError, quoted
from stages.host.host import Host
from stages.host.parts import WARM_POSITIONS, Parts, Release, load_parts
from stages.host.plan import HostPlan, ModelSource, check_cut, plan_host
from stages.host.scheduler import QUICK_MS, QUICK_ROWS
from stages.limits import MAX_RELEASES
from stages.memory import LOADING_BYTES, return_large_buffers, trim
from stages.model.pipeline import new_caches
from stages.model.prefill import READ_POSITIONS, split_reads
from stages.model.scoring import MAX_LOGITS, branch_pieces
from stages.pictures.trajectory import PicturePiece
from stages.threads import in_low_priority_thread
from stages.wire.status import StatusError, aborted, failed_precondition, not_found

log = logging.getLogger(__name__)


class Sources:
    """Places of a host's releases on disk: its store, and the checkpoint it was started with."""

    def __init__(self, checkpoint: Path, blocks: tuple[int, ...], store: ReleaseStore | None) -> None:
        self.checkpoint, self.blocks, self.store = checkpoint, blocks, store

    def start(self) -> list[Release]:
        """Releases to begin with, the newest last: the ones in use when this host last ended. Raises OnesweepError."""
        releases = []
        for name in self.store.in_use if self.store else ():
            try:
                releases.append(Release(name, self.plan(name)))
            except (OnesweepError, StatusError) as error:
                log.warning("skipping release %s: %s", name, error)
        if not releases:
            return [self.given()]
        if self.store and self.checkpoint != self.store.path(releases[-1].name):  # else it was started with the newest
            log.info("release %s was deployed to this host: it replaces %s", releases[-1].name, self.checkpoint)
        return releases

    def given(self) -> Release:
        """The release that the host was started with. Raises OnesweepError."""
        return Release(read_release_manifest(self.checkpoint).name, plan_host(self.checkpoint, self.blocks))

    def plan(self, name: str) -> HostPlan:
        """Raises CheckpointError or InputError, or StatusError (NOT_FOUND) if files of it must be stored first."""
        path = self.store.path(name) if self.store else None
        if path is None:
            with contextlib.suppress(CheckpointError):
                path = self.checkpoint if read_release_manifest(self.checkpoint).name == name else None
        if path is None:
            raise not_found(f"release {quoted(name)} is not stored on this host: store it first")
        plan = plan_host(path, self.blocks)
        for source in plan.models.values():
            for block in plan.blocks:
                if (part := source.manifest.parts[block]) is None or not has_size(source.directory / part.file, part):
                    raise not_found(f"release {name} is incomplete on this host: store it again")
        return plan


class Loader:
    """Loads and drops a host's releases, one at a time."""

    def __init__(self, host: Host, sources: Sources, backend: Backend, message_bytes: int) -> None:
        """:param message_bytes: the largest message that this host accepts."""
        self.host, self.sources, self.backend, self.message_bytes = host, sources, backend, message_bytes
        self._busy = asyncio.Lock()

    def require_store(self) -> ReleaseStore:
        """The release store. Raises StatusError if the host has none."""
        if self.sources.store is None:
            raise failed_precondition(f"{self.host.settings.name} has no release store: start it with --releases DIR")
        return self.sources.store

    async def begin(self) -> None:
        """Load the newest of the releases that the host begins with; skip releases that fail.

        Raises OnesweepError if none of them can be loaded, nor the release that the host was started with.
        """
        releases, loop = self.host.releases, asyncio.get_running_loop()
        async with self._busy:
            while True:
                release = releases.newest
                try:
                    release.parts = await loop.run_in_executor(self.host.compute, self._load, release.plan, ())
                    return
                except Exception as error:
                    others = releases.all[:-1] or self._fallback_releases(release)
                    if not others:
                        raise _as_onesweep_error(error, self.host.settings.name) from None
                    log.warning("skipping release %s: %s", release.name, error)
                    releases.all = others

    def _fallback_releases(self, failed: Release) -> list[Release]:
        """The release that the host was started with, if it is another one and also fits."""
        with contextlib.suppress(OnesweepError):
            given = self.sources.given()
            if given.plan != failed.plan:
                self._check(given.plan)
                return [given]
        return []

    async def load_rest(self) -> None:
        """Finish the start while the host works: load the other releases that it begins with."""
        for release in self.host.releases.all[-2::-1]:
            async with self._busy:
                if release.parts is not None or release not in self.host.releases.all:
                    continue  # meanwhile it was loaded on request, or dropped
                try:
                    release.parts = await self._load_in_background(release.plan)
                except Exception as error:
                    log.warning("skipping release %s: %s", release.name, error)
                    self.host.releases.all.remove(release)

    async def load(self, name: str, keep: Collection[str]) -> None:
        """Load a release as the newest one, and drop all others except those in `keep`. Raises StatusError."""
        self.require_store()
        if self._busy.locked():
            raise aborted(f"{self.host.settings.name} is already loading a release")
        async with self._busy:
            try:
                await self._make_newest(name, keep)
            except StatusError:
                raise
            except Exception as error:
                raise transfer_error(_as_onesweep_error(error, self.host.settings.name)) from None
        log.info("%s: release %s is loaded", self.host.settings.name, name)

    async def drop(self, name: str) -> None:
        """Drop a release and its files. Raises StatusError if it is the only one."""
        releases = self.host.releases
        async with self._busy:
            others = [release for release in releases.all if release.name != name]
            if not any(release.parts for release in others):
                raise failed_precondition(f"{quoted(name)} is the only release that {self.host.settings.name} has")
            releases.all = others
            try:
                await self._tidy()
            except OnesweepError as error:
                raise transfer_error(error) from None

    async def _make_newest(self, name: str, keep: Collection[str]) -> None:
        releases = self.host.releases
        release = next((each for each in releases.all if each.name == name), None)
        if release is None:
            release = Release(name, await asyncio.to_thread(self.sources.plan, name))
            self._check(release.plan)
            self._keep_only(keep, MAX_RELEASES - 1)
        if release.parts is None:
            release.parts = await self._load_in_background(release.plan)
        releases.all = [*(each for each in releases.all if each is not release), release]
        self._keep_only({name, *keep}, MAX_RELEASES)
        await self._tidy()

    def _check(self, plan: HostPlan) -> None:
        check_cut(plan.parts, self.host.releases.newest.plan.parts)
        if plan.message_bytes() > self.message_bytes:
            raise CheckpointError(
                f"its hops may take {plan.message_bytes()} bytes, but {self.host.settings.name} was started for "
                f"{self.message_bytes}: start it with this checkpoint"
            )

    def _keep_only(self, keep: Collection[str], most: int) -> None:
        """Drop other releases; sessions that use them end with them."""
        releases = self.host.releases
        kept = [release for release in releases.all if release.name in keep] or [releases.newest]
        if len(kept) > most:
            raise failed_precondition(f"a host can hold at most {MAX_RELEASES} releases: keep fewer")
        releases.all = kept

    async def _tidy(self) -> None:
        """Record the releases held, remove everything else from the store, and give memory back."""
        names = [release.name for release in self.host.releases.all]

        def tidy() -> None:
            if self.sources.store is not None:
                self.sources.store.use(names)
                self.sources.store.remove_others(names)
            trim()

        await in_low_priority_thread(tidy)

    async def _load_in_background(self, plan: HostPlan) -> Parts:
        # Not in a process of its own: that would need another copy of torch, 200 MB, and a way to hand sessions over.
        return await in_low_priority_thread(lambda: self._load(plan, self.host.releases.loaded))

    def _load(self, plan: HostPlan, held: Sequence[Parts]) -> Parts:
        return_large_buffers(LOADING_BYTES)
        try:
            parts = load_parts(plan, self.backend, held)
        finally:
            return_large_buffers()
        trim()  # memory left over from laying out matrices, before the warm-up allocates more
        log.info("%s: warming up the loaded weights", self.host.settings.name)
        warm_up(parts, {digest for other in held for digest in other.plan.weights})
        for other in held:
            parts.quick_rows.update({digest: n for digest, n in other.quick_rows.items() if digest in plan.weights})
        trim()
        return parts


def warm_up(parts: Parts, known: Collection[str] = ()) -> None:
    """Run every part once at full size: the first request must not pay for allocations and kernel choice.

    :param known: digests of models that run already.
    """
    for kind, source in parts.plan.models.items():
        runners = parts.runners[kind]
        if source.digest in known:
            continue
        if source.manifest.draws:
            _warm_pictures(kind, source, runners)
        elif kind == "chain":
            _warm_chain(source, runners, parts.device)
        else:
            _warm_pipeline(source, runners, parts.device)
            parts.quick_rows[source.digest] = _quick_rows(source, runners, parts.device)


def _warm_pictures(kind: str, source: ModelSource, runners: Mapping[int, PictureRunner]) -> None:
    a = source.manifest.picture_architecture
    count = max(ROWS_TOGETHER // a.tokens, 1)
    for index, runner in runners.items():
        numbers = a.patch_dim if kind != "steps" or index == 0 else a.features
        classes = torch.zeros(count, dtype=torch.int64)
        runner.evaluate([PicturePiece(torch.zeros(count, a.tokens, numbers), 1.0, classes)])


def _warm_chain(source: ModelSource, runners: Mapping[int, BlockRunner], device: torch.device) -> None:
    a = source.manifest.own_architecture
    room = min(a.positions, WARM_POSITIONS)
    half = room // 2
    for index, runner in runners.items():
        caches = new_caches(a.layers_in(index), a, room, device=device)
        for piece in split_reads(torch.zeros(half, dtype=torch.int64)):
            runner.read([CleanPiece(piece, caches)])
        state = torch.zeros(min(room - half, MAX_LOGITS // a.vocabulary), a.code_dim)
        runner.denoise([NoisyPiece(state, state, 1.0, half, caches)])


def _warm_pipeline(source: ModelSource, runners: Mapping[int, StageRunner], device: torch.device) -> None:
    a = source.manifest.text_architecture
    room = min(a.positions, WARM_POSITIONS)
    half = room // 2
    for index, runner in runners.items():
        short, layers = shortened(runner, a.layers_in(index))  # running all of a large stage would take minutes
        caches = new_caches(layers, a, room, device=device)
        full, branches = (
            torch.zeros(shape, dtype=torch.int64) if index == 0 else torch.zeros(*shape, a.width)
            for shape in ((min(READ_POSITIONS, room),), (2, half // 2))
        )
        for cache in caches:
            cache.length = room - len(full)
        hidden = short.read([CleanPiece(full, caches)])
        if index == a.parts - 1:
            runner.next_byte(hidden)
        for cache in caches:
            cache.length = half
        for piece in branch_pieces(branches):
            short.branch([BranchPiece(piece, caches)])


def _quick_rows(source: ModelSource, runners: Mapping[int, StageRunner], device: torch.device) -> int:
    """Number of new tokens that the stages here read within QUICK_MS at WARM_POSITIONS, QUICK_ROWS at most."""
    a = source.manifest.text_architecture
    room = min(a.positions, WARM_POSITIONS)
    caches = {i: new_caches(a.layers_in(i), a, room, device=device) for i in runners}

    def took_ms(rows: int) -> float:
        begin = monotonic()
        for index, runner in runners.items():
            piece = torch.zeros(rows, dtype=torch.int64) if index == 0 else torch.zeros(rows, a.width)
            for cache in caches[index]:
                cache.length = room - rows
            hidden = runner.read([CleanPiece(piece, caches[index])])
            float((runner.next_byte(hidden) if index == a.parts - 1 else hidden)[0].sum())  # waits for a GPU's result
        return (monotonic() - begin) * 1000

    rows = min(QUICK_ROWS, room)
    if min(took_ms(1) for _ in range(3)) >= QUICK_MS:  # the minimum, as the machine may be busy
        return 0
    while rows > 1 and min(took_ms(rows) for _ in range(3)) >= QUICK_MS:
        rows //= 2
    return rows


def _as_onesweep_error(error: Exception, host: str) -> OnesweepError:
    """`error` in a sentence for people; an unexpected error also goes into the log."""
    if isinstance(error, OnesweepError):
        return error
    log.error("%s: the weights cannot be run", host, exc_info=error)
    return ServiceError(f"the weights cannot be run ({error}); see the log above")
