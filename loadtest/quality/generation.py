"""Continuations from a router: every arm on every prompt, several requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.load.access import Access
from loadtest.quality.arm import INFILL, QualityArm
from loadtest.quality.prompts import Passage
from serving.client import AsyncClient, Client, Result
from serving.errors import RequestRefused, RouterError
from stages.errors import InputError, ServiceError

TRIES = 20
"""Of a request that is told to come back."""
TIMEOUT_S = 600.0
STATUS_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class RouterFacts:
    """What a router says of itself."""

    modes: tuple[str, ...]
    context_bytes: int
    request_limit: int
    digests: dict[str, str]
    """Of the weights behind it, by the name of their model."""


def router_facts(access: Access) -> RouterFacts:
    """Raises ServiceError when no router answers, or its hosts are not ready."""
    with Client(access.router, **access.who()) as client:
        status = client.status(STATUS_TIMEOUT_S)
    if not status.ready:
        reasons = "; ".join(host.reason for host in status.hosts if host.reason)
        raise ServiceError(f"the router at {access.router} is not ready: {reasons}")
    digests = {name: str(getattr(status, f"{name}_digest", "")) for name in ("chain", "ar", "scorer", "local")}
    return RouterFacts(
        tuple(status.modes),
        status.context_tokens,
        status.request_limit,
        {name: digest for name, digest in digests.items() if digest},
    )


def check_served(arms: Sequence[QualityArm], facts: RouterFacts, longest: int) -> None:
    """Raises InputError, before anything is generated, for a mode without weights or a context that is too small.

    :param longest: bytes of a prompt and its output together.
    """
    for arm in arms:
        if arm.mode not in facts.modes:
            raise InputError(
                f"mode {arm.mode} cannot be served: its weights are not there; "
                f"there are {', '.join(facts.modes) or 'no modes'}"
            )
    if longest > facts.context_bytes:
        raise InputError(
            f"prompt and output together take {longest} bytes, the model's context is {facts.context_bytes}: "
            "choose a smaller --bytes or --prompt-bytes"
        )


def generate_all(
    access: Access,
    arms: Sequence[QualityArm],
    passages: Sequence[Passage],
    max_bytes: int,
    seed: int,
    in_flight: int,
    progress: Callable[[int], object],
) -> dict[QualityArm, list[Result]]:
    """One Result for each arm and passage; passage i has the seed `seed` + i.

    The first passage goes through all arms first, one at a time: what the router refuses is known at once.
    Raises RequestRefused or RouterError, once.
    """
    return asyncio.run(_generate_all(access, arms, passages, max_bytes, seed, in_flight, progress))


async def _generate_all(
    access: Access,
    arms: Sequence[QualityArm],
    passages: Sequence[Passage],
    max_bytes: int,
    seed: int,
    in_flight: int,
    progress: Callable[[int], object],
) -> dict[QualityArm, list[Result]]:
    async with AsyncClient(access.router, **access.who()) as client:
        seats = asyncio.Semaphore(in_flight)

        async def one(arm: QualityArm, number: int) -> Result:
            async with seats:
                result = await _patiently(client, arm, _request(arm, passages[number], max_bytes, seed + number))
            progress(1)
            return result

        first = {arm: await one(arm, 0) for arm in arms}
        results = {}
        for arm in arms:
            others = await _all_or_none([one(arm, number) for number in range(1, len(passages))])
            results[arm] = [first[arm], *others]
        return results


async def _all_or_none(requests: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Raises the first error, with the other requests cancelled."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _request(arm: QualityArm, passage: Passage, max_bytes: int, seed: int) -> dict[str, Any]:
    suffix = {"suffix": passage.suffix} if arm.mode == INFILL else {}
    return {"prompt": passage.prompt, "max_bytes": max_bytes, "seed": seed, **suffix, **arm.request()}


async def _patiently(client: AsyncClient, arm: QualityArm, request: dict[str, Any]) -> Result:
    for _ in range(TRIES):
        try:
            return await client.generate(timeout_s=TIMEOUT_S, **request)
        except RequestRefused as refused:
            raise RequestRefused(f"{arm.label}: {refused}", refused.code) from None
        except RouterError as error:
            if error.retry_after_ms is None:
                raise RouterError(f"{arm.label}: {error}", error.code) from None
            await asyncio.sleep(error.retry_after_ms / 1000)
    raise ServiceError(f"{arm.label}: the router was busy {TRIES} times: try a smaller --in-flight")
