"""Fault schedules: requests, and faults that befall processes and links, drawn from a seed and done."""

from __future__ import annotations

import random
from dataclasses import dataclass

from loadtest.simulation.loop import Process, VirtualLoop
from loadtest.simulation.network import MemoryNetwork

STAGES, REPLICAS, ROUTERS, CLIENTS, REQUESTS = "abc", 2, 2, 2, 3
HOSTS = tuple(f"{stage}-{replica + 1}" for stage in STAGES for replica in range(REPLICAS))
ROUTER_NAMES = tuple(f"router-{i + 1}" for i in range(ROUTERS))
CLIENT_NAMES = tuple(f"client-{i + 1}" for i in range(CLIENTS))
COORDINATOR = "coordinator"
WORKERS = tuple(f"worker-{i + 1}" for i in range(4))  # two parts, two replicas of each
BEGIN_S = 2.0  # within which faults begin
MOST_FAULTS = 4
SLOW, SLOW_LINK_S = 50.0, 0.3  # times that a slow host takes; what a slow link takes more
# Of so many seeds one deploys a release meanwhile, and another is a training: both take files, which are slow.
DEPLOY_EVERY = TRAIN_EVERY = 8
TRAIN_AT = 4


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault: its lengths, how often it comes, and what it may cost."""

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
    "write": FaultKind(0.3, 3.0, 0, 0.0),  # a coordinator is killed in the middle of what it writes
}
TRAINING_KINDS = ("kill", "freeze", "cut", "one-way", "reset", "slow-link", "write", "write")
MOST_CHANGES = 40  # of its disk: a coordinator makes 110 in a run
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
    changes: int = 0  # of the disk, until a process is killed at one

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
    trains: bool = False  # it is a training, and no requests come


def make_schedule(seed: int, cases: int) -> Schedule:
    """The schedule of a seed. :param cases: texts to choose from.

    One host of each stage, one router and what links them are spared all but resets and slowness: there is a way
    through at any time, so no request may be lost. A client that knows one router knows that one.
    """
    chance = random.Random(seed)
    if seed % TRAIN_EVERY == TRAIN_AT:
        return _training(seed, chance)
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


def _training(seed: int, chance: random.Random) -> Schedule:
    """Faults of a training: of any process, and of what links workers to their coordinator."""
    faults = []
    for kind in chance.choices(TRAINING_KINDS, k=chance.randint(1, MOST_FAULTS)):
        targets: tuple[str, ...] = (chance.choice(WORKERS), COORDINATOR)[:: chance.choice((1, -1))]
        if kind in ("kill", "freeze", "write"):
            targets = (COORDINATOR if kind == "write" else chance.choice((COORDINATOR, *WORKERS)),)
        at_s, length_s = chance.uniform(0, BEGIN_S), chance.uniform(KINDS[kind].least_s, KINDS[kind].most_s)
        changes = chance.randint(1, MOST_CHANGES) if kind == "write" else 0
        faults.append(PlannedFault(kind, targets, at_s, length_s, changes))
    return Schedule(seed, (), (), tuple(sorted(faults, key=lambda fault: fault.at_s)), trains=True)


def _follows(one: str, other: str) -> bool:
    """True where the other host comes after the one, round the ring."""
    return STAGES[(STAGES.index(one[0]) + 1) % len(STAGES)] == other[0]


class FaultyWorld:
    """The processes of one schedule, by name, and the network between their machines."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.network = loop, MemoryNetwork(loop)
        self.processes: dict[str, Process] = {}
        self.lasting: dict[PlannedFault, None] = {}
        self.is_over = False  # no fault begins any more

    def start(self, name: str) -> None:
        """Start a process on the machine of that name."""
        raise NotImplementedError

    def slow(self, name: str, times: float) -> None:
        """Have a machine's arithmetic take so many times as long."""
        raise NotImplementedError

    def kill_at_change(self, name: str, changes: int) -> None:
        """Kill a process before or after one of the changes of its disk that come; 0: do not, after all."""
        raise NotImplementedError

    def close(self) -> None:
        """Close what processes had open."""

    def new_process(self, name: str) -> Process:
        process = self.processes[name] = Process(self.loop, name)
        return process

    def begin(self, fault: PlannedFault) -> None:
        """Let a fault begin, and end in its time; none does once it is over."""
        if self.is_over:
            return
        names, network = fault.targets, self.network
        self.lasting[fault] = None
        self.loop.call_later(fault.length_s, self.end, fault)
        match fault.kind:
            case "kill":
                network.kill(self.processes[names[0]])
            case "write":
                self.kill_at_change(names[0], fault.changes)
            case "freeze":
                network.freeze(self.processes[names[0]])
            case "cut":
                network.cut(*names)
                network.cut(*names[::-1])
            case "one-way":
                network.cut(*names)
            case "reset":
                network.reset(*names)
            case "slow":
                self.slow(names[0], SLOW)
            case "slow-link":
                network.link(*names).delay_s += SLOW_LINK_S

    def end(self, fault: PlannedFault) -> None:
        """Let a fault end, unless it has."""
        names, network = fault.targets, self.network
        if fault not in self.lasting:
            return
        del self.lasting[fault]
        if fault.kind == "write":
            self.kill_at_change(names[0], 0)
        match fault.kind:
            case "kill" | "write" if self.processes[names[0]].killed:
                self.start(names[0])
            case "freeze":
                self.processes[names[0]].resume()
            case "cut":
                network.mend(*names)
                network.mend(*names[::-1])
            case "one-way":
                network.mend(*names)
            case "slow":
                self.slow(names[0], 1.0)
            case "slow-link":
                network.link(*names).delay_s -= SLOW_LINK_S

    def end_all(self) -> None:
        """End what lasts; nothing begins any more."""
        self.is_over = True
        for fault in list(self.lasting):
            self.end(fault)
