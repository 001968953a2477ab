"""A rollback, and hosts that are being brought up to date."""

from __future__ import annotations

import asyncio
from typing import Any

from serving.router.ring import Ring
from serving.router.rollout import Rollout


class Release:
    """Of which there is nothing on this machine."""

    directory = None

    def __init__(self, name: str) -> None:
        self.name = self.release = name
        self.view: Any = self

    async def usable(self, wait_s: float) -> None:
        pass

    def pin(self) -> None:
        pass


def test_a_rollback_stops_what_brings_hosts_the_release_that_it_leaves() -> None:
    async def scene() -> None:
        ring = Ring(())
        new: Any = Release("new")
        rollout = Rollout(ring, new, None, None)
        rollout.previous_name, rollout._previous = "old", Release("old")  # type: ignore[assignment]
        started, late = asyncio.Event(), asyncio.Event()

        async def bring() -> None:
            try:
                started.set()
                await late.wait()
            finally:
                del rollout._bringing["a"]

        rollout._bringing = {"a": asyncio.create_task(bring())}
        await started.wait()
        rollout._bringing["b"] = asyncio.create_task(late.wait())  # type: ignore[arg-type]
        tasks = [*rollout._bringing.values()]
        switch = await rollout.rollback(lambda progress: None)
        assert (switch.release, switch.previous) == ("old", "new")
        assert all(task.cancelled() for task in tasks)
        assert rollout._bringing == {}

    asyncio.run(scene())
