"""A host with two releases: sessions end on the weights that they began with, whatever is loaded or let go of."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from stages.backends import backend_named
from stages.contents import read_contents
from stages.host import Host, HostSettings
from stages.links import Links
from stages.loading import Loader, Sources, warm_up
from stages.meter import HostMeter
from stages.parts import load_parts, plan_host
from stages.refusal import Refusal
from stages.shelf import Shelf
from stages.v1 import stage_pb2

Story = Callable[[Host, Loader], Awaitable[Any]]


@pytest.fixture
def tell(bundles: Path, tmp_path: Path) -> Callable[..., Any]:
    """Run a story with a host that holds all blocks of `own`, and has `other` on its shelf."""

    def run(story: Story, message_bytes: int = 64 << 20) -> Any:
        shelf = Shelf(tmp_path / "shelf")
        put(shelf, bundles / "other")

        async def main() -> Any:
            sources = Sources(bundles / "own", (0, 1, 2), shelf)
            (first,) = sources.start()
            host = Host(first, HostSettings("h"), Links(lambda *_: "", 0, 1 << 20, 1.0, 0.0, HostMeter()))
            loader = Loader(host, sources, backend_named("torch"), message_bytes)
            await loader.begin()
            events = host.subscribers.listen("r")
            await anext(events)
            worker = asyncio.create_task(host.work())
            try:
                return await asyncio.wait_for(story(host, loader), 30)
            finally:
                worker.cancel()
                host.close()

        try:
            return asyncio.run(main())
        finally:
            shelf.close()

    return run


def put(shelf: Shelf, bundle: Path) -> None:
    intake = shelf.begin(read_contents(bundle), lambda folder, part: True)
    for path in intake.wanted:
        intake.write(path, (bundle / path).read_bytes())
    intake.finish()


@pytest.fixture
def names(bundles: Path) -> dict[str, str]:
    return {name: read_contents(bundles / name).name for name in ("own", "other", "scored", "chained")}


def step(digest: str, session: str, number: int = 0, clean: bytes = b"Once ", start: int = 0) -> stage_pb2.Hop:
    hop = stage_pb2.Hop(router="r", session=session, capacity=40, digest=digest)
    hop.deadline_unix_ms = int(time.time() * 1000) + 30_000
    hop.step.CopyFrom(stage_pb2.Step(number=number, start=start, clean=clean, remaining=1, codec="fp32"))
    return hop


def ar_of(host: Host) -> str:
    source = host.releases.newest.plan.ar
    assert source is not None
    return source.digest


async def text(host: Host, digest: str, session: str) -> bytes:
    """Two greedy bytes, one hop each."""
    first = await host.run(step(digest, session), onward=False)
    assert isinstance(first, stage_pb2.Event)
    second = await host.run(step(digest, session, 1, first.text, 5), onward=False)
    assert isinstance(second, stage_pb2.Event)
    return first.text + second.text


def held(host: Host) -> list[str]:
    return [release.name for release in host.releases.all]


def test_a_session_outlives_its_release(tell: Callable[..., Any], names: dict[str, str], bundles: Path) -> None:
    async def story(host: Host, loader: Loader) -> None:
        old = ar_of(host)
        whole = await text(host, old, "whole")
        first = await host.run(step(old, "begun"), onward=False)
        assert isinstance(first, stage_pb2.Event)
        await loader.load(names["other"], [names["own"]])
        assert held(host) == [names["own"], names["other"]]
        middle = ar_of(host)
        assert {await text(host, middle, "m"), await text(host, old, "o")} > {whole}
        put(loader.require_shelf(), bundles / "scored")
        await loader.load(names["scored"], [names["other"]])
        assert held(host) == [names["other"], names["scored"]]
        rest = await host.run(step(old, "begun", 1, first.text, 5), onward=False)
        assert isinstance(rest, stage_pb2.Event)
        assert first.text + rest.text == whole
        with pytest.raises(Refusal, match="the request is for the checkpoint") as caught:
            await host.run(step(old, "late"), onward=False)
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION

    tell(story)


def test_a_session_takes_no_work_for_other_weights(tell: Callable[..., Any], names: dict[str, str]) -> None:
    async def story(host: Host, loader: Loader) -> None:
        old = ar_of(host)
        first = await host.run(step(old, "s"), onward=False)
        assert isinstance(first, stage_pb2.Event)
        await loader.load(names["other"], [names["own"]])
        with pytest.raises(Refusal, match="the request is for the checkpoint"):
            await host.run(step(ar_of(host), "s", 1, first.text, 5), onward=False)

    tell(story)


def test_what_a_host_refuses_to_load(
    tell: Callable[..., Any], names: dict[str, str], bundles: Path, tmp_path: Path
) -> None:
    async def story(host: Host, loader: Loader) -> None:
        async def refusal(name: str, *keep: str) -> Refusal:
            with pytest.raises(Refusal) as caught:
                await loader.load(name, keep)
            return caught.value

        assert (await refusal(names["chained"])).code is grpc.StatusCode.NOT_FOUND
        assert (await refusal("../../x")).code is grpc.StatusCode.NOT_FOUND
        await loader.load(names["other"], [names["own"]])
        put(loader.require_shelf(), bundles / "scored")
        assert "2 releases at most" in (await refusal(names["scored"], names["own"], names["other"])).message
        (damaged,) = (tmp_path / "shelf" / names["scored"] / "ar").glob("stage-1-*")
        damaged.write_bytes(damaged.read_bytes()[:-4])
        assert "fetch it again" in (await refusal(names["scored"], names["other"])).message
        assert held(host) == [names["other"]]
        with pytest.raises(Refusal, match="is the only release that h has"):
            await loader.drop(names["other"])
        await loader.load(names["own"], [names["other"]])
        assert held(host) == [names["other"], names["own"]]
        await loader.drop(names["other"])
        assert held(host) == [names["own"]]
        assert loader.require_shelf().in_use == [names["own"]]

    tell(story)


def test_a_release_for_larger_messages(tell: Callable[..., Any], names: dict[str, str]) -> None:
    async def story(host: Host, loader: Loader) -> None:
        with pytest.raises(Refusal, match="h was started for 1000: start it with this checkpoint"):
            await loader.load(names["other"], [])

    tell(story, message_bytes=1000)


def test_a_host_comes_back_with_what_it_had(tell: Callable[..., Any], names: dict[str, str], tmp_path: Path) -> None:
    async def story(host: Host, loader: Loader) -> list[str]:
        await loader.load(names["other"], [names["own"]])
        again = loader.sources.start()
        (broken,) = (tmp_path / "shelf" / names["other"] / "ar").glob("manifest.json")
        broken.write_text("{")
        assert [release.name for release in loader.sources.start()] == [names["own"]]
        return [release.name for release in again]

    assert tell(story) == [names["own"], names["other"]]


@pytest.mark.parametrize("backend", ["torch", "onnxruntime"])
def test_parts_are_freed_when_nobody_holds_them(bundles: Path, backend: str) -> None:
    if backend == "onnxruntime":
        pytest.importorskip("onnxruntime")
    plan = plan_host(bundles / "own", (0,))
    load_parts(plan, backend_named(backend))
    gc.collect()
    gc.disable()  # a collection stalls requests: none must be needed
    try:
        parts = load_parts(plan, backend_named(backend))
        warm_up(parts)
        runners = [weakref.ref(parts.chain[0]), weakref.ref(parts.ar[0])]
        del parts
        assert [runner() for runner in runners] == [None, None]
    finally:
        gc.enable()
