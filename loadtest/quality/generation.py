"""Continuations from a router for every arm: a mode with its settings, such as `resample:scorer:chunk=32`."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from onesweep.loadtest.quality.commands import QualitySettings, finite
from onesweep.loadtest.quality.prompts import Passage
from onesweep.loadtest.workload.caller import Access, RouterState
from onesweep.serving.client.client import AsyncClient, Client, RequestRefused, Result, RouterError
from onesweep.serving.modes import SCORERS
from onesweep.serving.modes.frontier import SETTINGS
from onesweep.serving.router.request import Request
from onesweep.stages.errors import InputError, ServiceError, one_of
from onesweep.stages.signals import run_interruptible

INFILL = "infill"


@dataclass(frozen=True)
class QualityArm:
    """One row of the table: requests that differ in nothing but prompt and seed. None is the router's to choose."""

    mode: str
    scorer: str | None = None
    chunk: int | None = None
    candidates: int | None = None
    steps: int | None = None
    temperature: float | None = None
    codec: str | None = None
    sampler: str | None = None
    drafter: str | None = None
    draft: int | None = None
    branches: int | None = None
    budget_ms: int | None = None

    @property
    def label(self) -> str:
        """A spec that gives this arm."""
        settings = (f"{name}={getattr(self, name)}" for name in KEYS if getattr(self, name) is not None)
        return ":".join([self.mode, *([self.scorer] if self.scorer else []), *settings])

    def request(self) -> dict[str, Any]:
        """Keyword arguments of `Client.generate` besides prompt, suffix, length and seed."""
        return {name: value for name, value in asdict(self).items() if value is not None}


# Settings that a spec can name, and their kind. Their ranges are the router's to check: it alone knows the model.
KEYS: dict[str, type] = {name: kind for name, kind in SETTINGS.items() if name != "scorer"} | {"budget_ms": int}


def parse_arm(spec: str, modes: Sequence[str]) -> QualityArm:
    """:param modes: names that are known. Raises InputError."""
    mode, *parts = (part.strip() for part in spec.split(":"))
    if mode not in modes:
        raise InputError(f"unknown mode {mode!r} in {spec!r}{one_of(mode, modes)}")
    scorer: str | None = None
    settings: dict[str, int | float | str] = {}
    for i, part in enumerate(parts):
        name, equals, value = part.partition("=")
        if not equals:
            if i or part not in SCORERS:
                raise InputError(
                    f"{spec!r}: {part!r} is not a setting; after the mode comes a scorer ({', '.join(SCORERS)}), "
                    f"then KEY=VALUE with the keys {', '.join(KEYS)}"
                )
            scorer = part
            continue
        if name not in KEYS:
            raise InputError(f"{spec!r}: unknown key {name!r}{one_of(name, KEYS)}")
        if name in settings:
            raise InputError(f"{spec!r} names {name} twice")
        settings[name] = _value(spec, name, value)
    arm = QualityArm(mode, scorer, **settings)  # type: ignore[arg-type] # KEYS has the kinds of the fields
    _check_request(spec, arm)
    return arm


def parse_arms(text: str, modes: Sequence[str]) -> tuple[QualityArm, ...]:
    """The arms of "M,M". Raises InputError."""
    arms = tuple(parse_arm(part, modes) for part in text.split(",") if part.strip())
    if not arms:
        raise InputError("--modes is empty: name one or more, such as sweep,ar")
    return distinct(arms)


def at_temperatures(arms: Sequence[QualityArm], temperatures: Sequence[float]) -> tuple[QualityArm, ...]:
    """Each arm at each temperature; one that names its own keeps it."""
    if not temperatures:
        return tuple(arms)
    return distinct(
        [
            replace(arm, temperature=temperature)
            for arm in arms
            for temperature in (temperatures if arm.temperature is None else [arm.temperature])
        ]
    )


def distinct(arms: Sequence[QualityArm]) -> tuple[QualityArm, ...]:
    """`arms`. Raises InputError when one is there twice."""
    labels = [arm.label for arm in arms]
    for label in labels:
        if labels.count(label) > 1:
            raise InputError(f"{label!r} is named twice")
    return tuple(arms)


def _value(spec: str, name: str, text: str) -> int | float | str:
    try:
        return finite(text) if KEYS[name] is float else KEYS[name](text)
    except ValueError:
        wanted = "a whole number" if KEYS[name] is int else "a number"
        raise InputError(f"{spec!r}: {name} must be {wanted}, not {text!r}") from None


def _check_request(spec: str, arm: QualityArm) -> None:
    """Raise InputError for what a request's message cannot carry, before a router is asked."""
    try:
        Request(prompt=b"x", **arm.request()).message()
    except InputError as error:
        raise InputError(f"{spec!r}: {error}") from None


TRIES = 20  # of one request while the router is busy
TIMEOUT_S = 600.0  # far links and many candidates: a slow text is no reason to end a run of hours


def router_facts(access: Access) -> RouterState:
    """Raises ServiceError when no router answers, or its hosts are not ready."""
    with Client(access.router, **access.who()) as client:
        facts = RouterState.of(client)
    facts.check_ready(access.router)
    return facts


def check_served(arms: Sequence[QualityArm], facts: RouterState, longest: int) -> None:
    """Raises InputError, before anything is generated, for a mode without weights or a context that is too small.

    :param longest: bytes of a prompt and its output together.
    """
    for arm in arms:
        if arm.mode not in facts.modes:
            raise InputError(
                f"mode {arm.mode} cannot be served: its weights are not there; "
                f"there are {', '.join(facts.modes) or 'no modes'}"
            )
    if longest > facts.context_length:
        raise InputError(
            f"prompt and output together take {longest} bytes, the model's context is {facts.context_length}: "
            "choose a smaller --bytes or --prompt-bytes"
        )


def generate_all(
    access: Access,
    arms: Sequence[QualityArm],
    passages: Sequence[Passage],
    settings: QualitySettings,
    facts: RouterState,
    progress: Callable[[int], object],
) -> dict[QualityArm, list[Result]]:
    """One Result for each arm and passage; passage i has the seed of the settings + i.

    Raises RequestRefused or RouterError, once.
    """

    async def generate() -> dict[QualityArm, list[Result]]:
        async with AsyncClient(access.router, **access.who()) as client:
            seats = asyncio.Semaphore(min(settings.in_flight, facts.request_limit))

            async def one(arm: QualityArm, number: int) -> Result:
                async with seats:
                    result = await _patiently(client, arm, _request(arm, passages[number], number, settings))
                progress(1)
                return result

            # one at a time: what the router refuses is known at once, and not after an hour of other arms
            first = {arm: await one(arm, 0) for arm in arms}
            others = range(1, len(passages))
            return {arm: [first[arm], *await _all_or_none([one(arm, i) for i in others])] for arm in arms}

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


def _request(arm: QualityArm, passage: Passage, number: int, settings: QualitySettings) -> dict[str, Any]:
    suffix = {"suffix": passage.suffix} if arm.mode == INFILL else {}
    same = {"prompt": passage.prompt, "max_bytes": settings.max_bytes, "seed": settings.seed + number}
    return same | suffix | arm.request()


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
