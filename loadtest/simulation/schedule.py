"""Fault schedules: which requests come, and what happens to whom at which moment, drawn from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

STAGES, REPLICAS, ROUTERS, CLIENTS, REQUESTS = "abc", 2, 2, 2, 3
HOSTS = tuple(f"{stage}-{replica + 1}" for stage in STAGES for replica in range(REPLICAS))
ROUTER_NAMES = tuple(f"router-{i + 1}" for i in range(ROUTERS))
CLIENT_NAMES = tuple(f"client-{i + 1}" for i in range(CLIENTS))
BEGIN_S = 2.0  # within which faults begin
MOST_FAULTS = 4

# How long a fault of each kind lasts, and how often it comes beside the others.
KINDS: dict[str, tuple[float, float, int]] = {
    "kill": (0.3, 6.0, 4),  # a process, and another in its place
    "freeze": (0.3, 8.0, 3),  # it runs nothing, and its connections stay
    "cut": (0.2, 20.0, 3),  # a link, both ways
    "one-way": (0.2, 20.0, 2),
    "reset": (0.0, 0.0, 3),  # every connection between two machines
    "slow": (0.5, 6.0, 1),  # a host's arithmetic
    "slow-link": (0.5, 6.0, 1),
    "leave": (0.3, 1.0, 1),  # a client goes before it has its texts
    "hurry": (0.3, 2.0, 1),  # a client's requests have a short deadline
}


@dataclass(frozen=True)
class PlannedFault:
    """A fault that is to come. Times are seconds; `at_s` since the first request."""

    kind: str
    targets: tuple[str, ...]  # a process, or both ends of a link, its source first
    at_s: float
    length_s: float

    def __str__(self) -> str:
        lasts = f" for {self.length_s:.2f} s" if self.length_s else ""
        return f"{self.at_s:.2f} s: {self.kind} {' - '.join(self.targets)}{lasts}"


@dataclass(frozen=True)
class Asked:
    """A request: one of the texts that are known, and the pause before it."""

    case: int
    pause_s: float


@dataclass(frozen=True)
class Schedule:
    """All that a seed decides."""

    seed: int
    requests: tuple[tuple[Asked, ...], ...]  # of each client
    routers: tuple[tuple[str, ...], ...]  # that each client knows
    faults: tuple[PlannedFault, ...]


def make_schedule(seed: int, cases: int) -> Schedule:
    """The schedule of a seed. :param cases: texts to choose from.

    One host of each stage, one router and what links them are spared all but resets and slowness: there is a way
    through at any time, so no request may be lost. A client that knows one router knows that one.
    """
    chance = random.Random(seed)
    spared = {f"{stage}-{chance.randint(1, REPLICAS)}" for stage in STAGES}
    spared_router = chance.choice(ROUTER_NAMES)
    harmed = [name for name in (*HOSTS, *ROUTER_NAMES) if name not in spared | {spared_router}]
    links = [(router, host) for router in ROUTER_NAMES for host in HOSTS]
    links += [(client, router) for client in CLIENT_NAMES for router in ROUTER_NAMES]
    links += [(one, other) for one in HOSTS for other in HOSTS if _follows(one, other)]
    safe = spared | {spared_router, *CLIENT_NAMES}
    able = [ends for ends in links if not set(ends) <= safe]
    faults = []
    for kind in chance.choices(
        list(KINDS), [weight for *_, weight in KINDS.values()], k=chance.randint(1, MOST_FAULTS)
    ):
        match kind:
            case "kill" | "freeze":
                targets: tuple[str, ...] = (chance.choice(harmed),)
            case "cut" | "one-way":
                targets = chance.choice(able)
            case "reset" | "slow-link":
                targets = chance.choice(links)
            case "slow":
                targets = (chance.choice(HOSTS),)
            case _:
                targets = (chance.choice(CLIENT_NAMES),)
        if chance.random() < 0.5:  # of a link, the direction that is cut
            targets = targets[::-1]
        least_s, most_s, _ = KINDS[kind]
        faults.append(PlannedFault(kind, targets, chance.uniform(0, BEGIN_S), chance.uniform(least_s, most_s)))
    requests = tuple(
        tuple(Asked(chance.randrange(cases), chance.uniform(0, 0.5)) for _ in range(REQUESTS)) for _ in CLIENT_NAMES
    )
    others = tuple(name for name in ROUTER_NAMES if name != spared_router)
    known = tuple(
        chance.choice([(spared_router,), (spared_router, *others), (*others, spared_router)]) for _ in CLIENT_NAMES
    )
    return Schedule(seed, requests, known, tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _follows(one: str, other: str) -> bool:
    """True where the other host comes after the one, round the ring."""
    return STAGES[(STAGES.index(one[0]) + 1) % len(STAGES)] == other[0]
