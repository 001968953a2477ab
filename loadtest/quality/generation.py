"""Continuations from a router, for every variant."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from onesweep.loadtest.quality.commands import QualitySettings
from onesweep.loadtest.quality.prompts import Passage
from onesweep.loadtest.workload.caller import Access, RouterState
from onesweep.loadtest.workload.variants import Variant
from onesweep.serving.client.client import AsyncClient, Client, RequestRefused, Result, RouterError
from onesweep.stages.errors import InputError, ServiceError
from onesweep.stages.signals import run_interruptible

TRIES = 20  # of one request while the router is busy
TIMEOUT_S = 600.0  # far links and many candidates: a slow text is no reason to end a run of hours


def router_facts(access: Access) -> RouterState:
    """Raises ServiceError when no router answers, or its hosts are not ready."""
    with Client(access.router, **access.who()) as client:
        facts = RouterState.of(client)
    facts.check_ready(access.router)
    return facts


def check_served(variants: Sequence[Variant], facts: RouterState, longest: int) -> None:
    """Raises InputError, before anything is generated, for a mode without weights or a context that is too small.

    :param longest: bytes of a prompt and its output together.
    """
    for variant in variants:
        if variant.mode not in facts.modes:
            raise InputError(
                f"mode {variant.mode} cannot be served: its weights are not there; "
                f"there are {', '.join(facts.modes) or 'no modes'}"
            )
    if longest > facts.context_length:
        raise InputError(
            f"prompt and output together take {longest} bytes, the model's context is {facts.context_length}: "
            "choose a smaller --bytes or --prompt-bytes"
        )


def generate_all(
    access: Access,
    variants: Sequence[Variant],
    passages: Sequence[Passage],
    settings: QualitySettings,
    facts: RouterState,
    progress: Callable[[int], object],
) -> dict[Variant, list[Result]]:
    """One Result for each variant and passage; passage i has the seed of the settings + i.

    Raises RequestRefused or RouterError, once.
    """

    async def generate() -> dict[Variant, list[Result]]:
        async with AsyncClient(access.router, **access.who()) as client:
            places = asyncio.Semaphore(1 if settings.write else min(settings.in_flight, facts.request_limit))

            async def one(variant: Variant, number: int) -> Result:
                async with places:
                    request = {"prompt": passages[number].prompt, "max_bytes": settings.max_bytes, **variant.request()}
                    result = await _patiently(client, variant, request | {"seed": settings.seed + number})
                progress(1)
                return result

            # one at a time: what the router refuses is known at once, and not after an hour of others
            first = {variant: await one(variant, 0) for variant in variants}
            others = range(1, len(passages))
            return {
                variant: [first[variant], *await _all_or_none([one(variant, i) for i in others])]
                for variant in variants
            }

    return run_interruptible(generate())


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


async def _patiently(client: AsyncClient, variant: Variant, request: dict[str, Any]) -> Result:
    for _ in range(TRIES):
        try:
            return await client.generate(timeout_s=TIMEOUT_S, **request)
        except RequestRefused as refused:
            raise RequestRefused(f"{variant.label}: {refused}", refused.code) from None
        except RouterError as error:
            if error.retry_after_ms is None:
                raise RouterError(f"{variant.label}: {error}", error.code) from None
            await asyncio.sleep(error.retry_after_ms / 1000)
    raise ServiceError(f"{variant.label}: the router was busy {TRIES} times: try a smaller --in-flight")
