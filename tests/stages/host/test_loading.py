"""A host with two releases: sessions end on the weights that they began with, whatever is loaded or let go of."""

import gc
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from stages.backends import Backend
from stages.checkpoint.release_store import ReleaseStore, read_release_manifest
from stages.host.host import Host
from stages.host.loading import Loader, Sources, warm_up
from stages.host.next_hosts import NextHosts
from stages.host.parts import Release, load_parts
from stages.host.plan import plan_host
from stages.host.settings import HostSettings
from stages.v1 import stage_pb2
from stages.wire.status import StatusError
from tests.conftest import refused
from tests.stages.checkpoints import put_release
from tests.stages.hops import opening
from tests.stages.hosts import event_of, listening

HeldBy = Callable[..., Any]


@pytest.fixture
def held_by(bundles: Path, tmp_path: Path) -> HeldBy:
    """Open a host that holds all blocks of `own`, and has `other` in its store; with its loader."""

    @asynccontextmanager
    async def opened(message_bytes: int = 64 << 20) -> AsyncIterator[tuple[Host, Loader]]:
        store = ReleaseStore(tmp_path / "releases")
        put_release(store, bundles / "other")
        sources = Sources(bundles / "own", (0, 1, 2), store)
        (first,) = sources.start()
        host = Host(first, HostSettings("h"), NextHosts(lambda *_: "", 0, 1 << 20, 1.0, 0.0))
        loader = Loader(host, sources, Backend(), message_bytes)
        await loader.begin()
        async with listening(host):
            yield host, loader
        store.close()

    return opened


@pytest.fixture
def names(bundles: Path) -> dict[str, str]:
    return {name: read_release_manifest(bundles / name).name for name in ("own", "other", "scored")}


def step(digest: str, session: str, after: bytes = b"") -> stage_pb2.Hop:
    """A session's first step, or the second one, after what the first one brought."""
    new = {"number": 1, "start": 5, "clean": after} if after else {"clean": b"Once "}
    return opening(digest, session, **new)


def ar_of(host: Host) -> str:
    return str(host.releases.newest.plan.models["ar"].digest)


async def outcome(host: Host, hop: stage_pb2.Hop) -> stage_pb2.Event:
    host.accept(hop, 10)
    host._go()
    return await event_of(host)


async def text(host: Host, digest: str, session: str) -> bytes:
    """Two bytes, one hop each."""
    first = await outcome(host, step(digest, session))
    return first.text + (await outcome(host, step(digest, session, first.text))).text


def held(host: Host) -> list[str]:
    return [release.name for release in host.releases.all]


async def test_a_session_outlives_its_release(held_by: HeldBy, names: dict[str, str], bundles: Path) -> None:
    async with held_by() as (host, loader):
        old = ar_of(host)
        whole = await text(host, old, "whole")
        first, other = await outcome(host, step(old, "begun")), await outcome(host, step(old, "other"))
        await loader.load(names["other"], [names["own"]])
        assert held(host) == [names["own"], names["other"]]
        middle = ar_of(host)
        with pytest.raises(StatusError, match="the request is for the checkpoint"):  # with another's weights
            await outcome(host, step(middle, "other", other.text))
        assert {await text(host, middle, "m"), await text(host, old, "o")} > {whole}
        put_release(loader.require_store(), bundles / "scored")
        await loader.load(names["scored"], [names["other"]])
        assert held(host) == [names["other"], names["scored"]]
        rest = await outcome(host, step(old, "begun", first.text))
        assert first.text + rest.text == whole
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "the request is for the checkpoint"):
            await outcome(host, step(old, "late"))


async def test_a_damaged_release_is_not_loaded(held_by: HeldBy, names: dict[str, str], bundles: Path, tmp_path) -> None:
    async with held_by() as (host, loader):
        for unknown in ("0" * 64, "../../x"):
            with refused(grpc.StatusCode.NOT_FOUND):
                await loader.load(unknown, [])
        await loader.load(names["other"], [names["own"]])
        put_release(loader.require_store(), bundles / "scored")
        with pytest.raises(StatusError, match="at most 2 releases"):
            await loader.load(names["scored"], [names["own"], names["other"]])
        (damaged,) = (tmp_path / "releases" / names["scored"] / "ar").glob("stage-1-*")
        damaged.write_bytes(damaged.read_bytes()[:-4])
        with refused(
            grpc.StatusCode.NOT_FOUND, f"release {names['scored']} is incomplete on this host: store it again"
        ):
            await loader.load(names["scored"], [names["other"]])
        damaged.write_bytes(damaged.read_bytes() + b"....")
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "fetch it again"):
            await loader.load(names["scored"], [names["other"]])
        assert held(host) == [names["other"]]
        await loader.load(names["own"], [names["other"]])
        assert held(host) == [names["other"], names["own"]]
        await loader.drop(names["other"])
        assert held(host) == [names["own"]]
        assert loader.require_store().in_use == [names["own"]]


async def test_a_restarted_host_loads_the_releases_it_had(
    held_by: HeldBy, names: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with held_by() as (_, loader):
        await loader.load(names["other"], [names["own"]])
        assert [release.name for release in loader.sources.start()] == [names["own"], names["other"]]
        assert caplog.text.count("it replaces") == 1
        Sources(tmp_path / "releases" / names["other"], (0, 1, 2), loader.sources.store).start()
        assert caplog.text.count("it replaces") == 1, "a machine's first start is with that release"
        (broken,) = (tmp_path / "releases" / names["other"] / "ar").glob("manifest.json")
        broken.write_text("{")
        assert [release.name for release in loader.sources.start()] == [names["own"]]


def test_a_host_with_other_blocks_asks_for_their_files(bundles: Path, tmp_path, names) -> None:
    store = ReleaseStore(tmp_path / "releases")
    put_release(store, bundles / "other", (1,))
    store.use([names["other"]])
    assert [release.name for release in Sources(bundles / "own", (1,), store).start()] == [names["other"]]
    sources = Sources(bundles / "own", (1, 2), store)
    assert [release.name for release in sources.start()] == [names["own"]]
    with refused(grpc.StatusCode.NOT_FOUND, "is incomplete on this host: store it again"):
        sources.plan(names["other"])
    put_release(store, bundles / "other", (1, 2))
    assert sources.plan(names["other"]).blocks == (1, 2)
    store.close()


async def test_an_unloaded_release_is_loaded_on_request(held_by: HeldBy, names) -> None:
    async with held_by() as (host, loader):
        waiting = Release(names["other"], loader.sources.plan(names["other"]))
        host.releases.all.insert(0, waiting)
        await loader.load(names["other"], [names["own"]])
        assert held(host) == [names["own"], names["other"]]
        assert waiting.parts is not None


def test_parts_are_freed_after_their_last_session(bundles: Path) -> None:
    plan = plan_host(bundles / "own", (0,))
    load_parts(plan)
    gc.collect()
    gc.disable()  # a collection stalls requests: none must be needed
    try:
        parts = load_parts(plan)
        warm_up(parts)
        runners = [weakref.ref(parts.runners["chain"][0]), weakref.ref(parts.runners["ar"][0])]
        del parts
        assert [runner() for runner in runners] == [None, None]
    finally:
        gc.enable()
