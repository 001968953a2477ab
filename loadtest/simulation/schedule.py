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
DEPLOY_EVERY = 8  # seeds: it takes files, which are slow


@dataclass(frozen=True)
class FaultKind:
    """What one kind of fault is like."""

    least_s: float  # it lasts
    most_s: float
    weight: int  # how often it comes beside the others
    delay_s: float  # that it may cost a request, at most: until it is noticed, and the work was done elsewhere


KINDS = {
    "kill": FaultKind(0.3, 6.0, 4, 0.6),  # a process, and another in its place
    "freeze": FaultKind(0.3, 8.0, 3, 1.5),  # it runs nothing, and its connections stay
    "cut": FaultKind(0.2, 20.0, 3, 1.5),  # a link, both ways
    "one-way": FaultKind(0.2, 20.0, 2, 1.5),
    "reset": FaultKind(0.0, 0.0, 3, 0.6),  # every connection between two machines
    "slow": FaultKind(0.5, 6.0, 1, 6.0),  # a host's arithmetic
    "slow-link": FaultKind(0.5, 6.0, 1, 6.0),
    "leave": FaultKind(0.3, 1.0, 1, 0.0),  # a client goes before it has its texts
    "hurry": FaultKind(0.3, 2.0, 1, 0.0),  # a client's requests have a short deadline
}
# A router that is silent is left by its clients once gRPC's keepalive says so, and another was dialled in vain.
SILENT_ROUTER_S = 20.0
AGAIN_S = 1.0  # after the end of a fault: what it held up comes, what it ended is begun anew


@dataclass(frozen=True)
class PlannedFault:
    """A fault that is to come. Times are seconds; `at_s` since the first request."""

    kind: str
    targets: tuple[str, ...]  # a process, or both ends of a link, its source first
    at_s: float
    length_s: float

    @property
    def hits_host(self) -> bool:
        return any(name in HOSTS for name in self.targets)

    def delay_s(self, begin_s: float, end_s: float) -> float:
        """Time that a request from `begin_s` to `end_s`, since the first one, may have lost by it."""
        if self.at_s > end_s or self.at_s + self.length_s + AGAIN_S < begin_s:
            return 0.0
        is_silent = self.kind in ("freeze", "cut", "one-way") and not self.hits_host
        return min(SILENT_ROUTER_S if is_silent else KINDS[self.kind].delay_s, self.length_s + AGAIN_S)

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
    deploy_at_s: float | None = None  # when the other release is deployed, if it is


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
    for kind in chance.choices(list(KINDS), [kind.weight for kind in KINDS.values()], k=chance.randint(1, MOST_FAULTS)):
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
        at_s, length_s = chance.uniform(0, BEGIN_S), chance.uniform(KINDS[kind].least_s, KINDS[kind].most_s)
        faults.append(PlannedFault(kind, targets, at_s, length_s))
    requests = tuple(
        tuple(Asked(chance.randrange(cases), chance.uniform(0, 0.5)) for _ in range(REQUESTS)) for _ in CLIENT_NAMES
    )
    others = tuple(name for name in ROUTER_NAMES if name != spared_router)
    known = tuple(
        chance.choice([(spared_router,), (spared_router, *others), (*others, spared_router)]) for _ in CLIENT_NAMES
    )
    deploy_at_s = chance.uniform(0, BEGIN_S) if seed % DEPLOY_EVERY == 0 else None
    return Schedule(seed, requests, known, tuple(sorted(faults, key=lambda fault: fault.at_s)), deploy_at_s)


def _follows(one: str, other: str) -> bool:
    """True where the other host comes after the one, round the ring."""
    return STAGES[(STAGES.index(one[0]) + 1) % len(STAGES)] == other[0]
