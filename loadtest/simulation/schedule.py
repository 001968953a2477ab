"""Fault schedules: requests, and faults of processes and links, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from serving.router.paths import HEDGES

STAGES, REPLICAS, ROUTERS, CLIENTS, REQUESTS = "abc", 2, 2, 2, 3
HOSTS = tuple(f"{stage}-{replica + 1}" for stage in STAGES for replica in range(REPLICAS))
ROUTER_NAMES = tuple(f"router-{i + 1}" for i in range(ROUTERS))
CLIENT_NAMES = tuple(f"client-{i + 1}" for i in range(CLIENTS))
COORDINATOR = "coordinator"
WORKERS = tuple(f"worker-{i + 1}" for i in range(4))  # two parts, two replicas of each
BEGIN_S = 2.0  # faults begin within this time
MAX_FAULTS = 4
SLOW = 50.0, (450.0, 520.0)  # slowdown of a host; range with which a second try begins alongside the first
SLOW_ALONE, PARTITION_S = 100.0, (0.3, 3.5)  # slowdown of a range's only host; pause between the losses of both routers
GONE_S = 600.0  # how long the other host is lost
SLOW_LINK_S, FLAP_S, JUMP_S = 0.3, 0.75, (1.0, 4.0)  # a slow link's extra delay; time between resets; jump of a clock
# Of this many seeds, one deploys a release meanwhile and another is a training: both need files, which are slow.
DEPLOY_EVERY = TRAIN_EVERY = ALONE_EVERY = LIE_EVERY = DATE_EVERY = MOVE_EVERY = 8
# In others a stage has only one host, a host lies, a machine has a wrong date, or a host moves to another address.
TRAIN_AT, ALONE_AT, LIE_AT, DATE_AT, MOVE_AT = 4, 2, 6, 7, 3
DRAW_EVERY, DRAW_AT = 16, 13  # of this many seeds, one draws pictures, without deployments, lies or wrong dates
AHEAD_S = {"day": 86_400.0, "month": 31 * 86_400.0}


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault: its durations, frequency and possible cost."""

    min_s: float  # shortest and longest duration
    max_s: float
    weight: int  # relative frequency
    delay_s: float  # most time that it may cost a request, until it is noticed and the work done elsewhere


KINDS = {
    "kill": FaultKind(0.3, 6.0, 4, 0.6),  # a process, replaced by another
    "replace": FaultKind(0.3, 6.0, 1, 0.6),  # the same, with an empty disk
    "freeze": FaultKind(0.3, 8.0, 3, 1.6),  # a process runs nothing, and its connections stay open
    "cut": FaultKind(0.2, 20.0, 3, 1.6),  # a link, in both directions
    "one-way": FaultKind(0.2, 20.0, 2, 1.6),
    "reset": FaultKind(0.0, 0.0, 3, 0.6),  # every connection between two machines
    "half-open": FaultKind(0.5, 8.0, 2, 0.6),  # the same, but the accepting side notices only at the end
    "flap": FaultKind(1.0, 5.0, 2, 6.0),  # reset after reset
    "slow": FaultKind(0.5, 6.0, 2, 6.0),  # a host's computation
    "slow-link": FaultKind(0.5, 6.0, 1, 6.0),
    "full": FaultKind(0.5, 6.0, 2, 0.6),  # a host has no memory for sessions
    "broken": FaultKind(0.5, 6.0, 1, 0.6),  # every computation of a host fails
    "echo": FaultKind(0.5, 6.0, 1, 0.0),  # a host sends every result twice
    "jump": FaultKind(0.0, 0.0, 2, 6.0),  # a machine's clock jumps ahead
    "untrusted": FaultKind(0.3, 6.0, 2, 0.6),  # a machine's certificate is rejected, and all connections end
    "token": FaultKind(0.3, 6.0, 2, 1.6),  # a host rejects every token
    "lie": FaultKind(0.5, 6.0, 0, 10.0),  # a host returns wrong numbers, or a worker a wrong update
    "no-room": FaultKind(0.3, 6.0, 0, 0.0),  # a disk is full
    "power": FaultKind(0.3, 6.0, 0, 0.6),  # like kill, and the disk keeps only synced data
    "torn": FaultKind(0.3, 6.0, 0, 0.6),  # like power, in the middle of a write, of which part remains
    "day": FaultKind(0.3, 6.0, 0, 0.0),  # a machine's date is a day ahead
    "month": FaultKind(0.3, 6.0, 0, 0.6),  # or a month: no certificate is valid, and open connections stay
    "move": FaultKind(0.3, 6.0, 0, 0.6),  # the topology drops a host, then has it at another address
    "leave": FaultKind(0.3, 1.0, 1, 0.0),  # a client leaves before it has its texts
    "hurry": FaultKind(0.3, 2.0, 1, 0.0),  # a client's requests have a short deadline
}
SILENT_KINDS = ("freeze", "cut", "one-way")
PROCESS_KINDS = KINDS.keys() - {"cut", "one-way", "reset", "half-open", "flap", "slow-link", "leave"}
TRAINING_KINDS = sorted(
    KINDS.keys() - {"replace", "flap", "slow", "full", "broken", "echo", "day", "month", "move", "leave", "hurry"}
)
COORDINATOR_KINDS = ("token", "no-room", "power", "torn")
WRITES = 6.0  # most writes until one is torn
# Clients leave a silent router once gRPC's keepalive notices, and another was dialled in vain.
SILENT_ROUTER_S = 20.0
UNACKNOWLEDGED_S = 5.7  # until a hop without an ack fails, if no second try overtakes it
SILENCE_S = 2.4  # until a router leaves a silent host, if no second try overtakes it
DEPLOYED_S = 4.0, 4.5  # after its start, a deployment is done
AGAIN_S = 1.0  # after the end of a fault: delayed work arrives, and ended work has restarted
KNOWN_S = 6.0  # after its start: routers avoid it
LATE_S = 2.0, 7.0  # pause before a request that comes during a known fault


@dataclass(frozen=True)
class PlannedFault:
    """A planned fault. Times are in seconds; `at_s` counts from the first request."""

    kind: str
    targets: tuple[str, ...]  # a process, or both ends of a link, its source first
    at_s: float
    length_s: float
    strength: float = 0.0  # slowdown factor, seconds, or writes until one is torn

    @property
    def end_s(self) -> float:
        return self.at_s + self.length_s

    @property
    def stages(self) -> set[str]:  # of the hosts that it hits
        return {name[0] for name in self.targets if name in HOSTS}

    def delay_s(self, begin_s: float, end_s: float, others: tuple[PlannedFault, ...], is_spent: bool = False) -> float:
        """Time that a request from `begin_s` to `end_s` (since the first one) may have lost by this fault.

        :param others: faults that may keep its ends from noticing it.
        :param is_spent: no second try overtakes slow work."""
        overlapping = [each for each in others if each is not self and {*each.targets} & {*self.targets}]
        seen_s = max([self.at_s, *(each.end_s for each in overlapping if each.at_s < begin_s)])
        if self.at_s > end_s or (self.end_s + AGAIN_S < begin_s and self.kind != "lie"):  # hosts cache lies
            return 0.0
        delay_s = KINDS[self.kind].delay_s
        if self.kind in SILENT_KINDS and not self.stages:
            delay_s = SILENT_ROUTER_S
        elif self.kind in SILENT_KINDS:
            if seen_s + KNOWN_S < begin_s and end_s < self.end_s:
                return 0.0
            is_only = any(each is not self and each.stages & self.stages for each in others)  # no router leaves it
            spent_s = UNACKNOWLEDGED_S if is_only or set(self.targets) <= set(HOSTS) else SILENCE_S
            earlier = [each for each in others if each.kind in SILENT_KINDS and each.at_s < min(begin_s, self.at_s)]
            delay_s = spent_s if is_spent or is_only or earlier else delay_s  # routers wait longer from then on
        return min(delay_s, self.length_s + AGAIN_S)

    def __str__(self) -> str:
        lasts = f" for {self.length_s:.2f} s" if self.length_s else ""
        return f"{self.at_s:.2f} s: {self.kind} {' - '.join(self.targets)}{lasts}"


@dataclass(frozen=True)
class Asked:
    """A request: one of the known texts, and the pause before it."""

    case: int
    pause_s: float


@dataclass(frozen=True)
class Schedule:
    """Everything that a seed determines."""

    seed: int
    requests: tuple[tuple[Asked, ...], ...]  # per client
    routers: tuple[tuple[str, ...], ...]  # known to each client
    faults: tuple[PlannedFault, ...]
    deploy_at_s: float | None = None  # when to deploy the other release, if at all
    trains: bool = False  # a training, without requests
    draws: bool = False  # its requests are for pictures, and a case is a picture
    second_tries: float = HEDGES  # allowed for each router


def make_schedule(seed: int, cases: int, is_scripted: bool = False) -> Schedule:
    """The schedule of a seed. :param cases: texts to choose from. :param is_scripted: only requests, without files.

    One host of each stage, one router and the links between them get only resets and slowness: there is a path at any
    time, so no request may be lost. A client that knows only one router knows this one. Routers prefer the first of
    equal hosts, which is mostly not the spared one. If a stage has only one host, it only freezes, for less time than
    requests wait.
    """
    rng = random.Random(seed)
    if seed % TRAIN_EVERY == TRAIN_AT and not is_scripted:
        return _training(seed, rng)
    spared = {f"{stage}-{rng.choice((1, 2, 2, 2))}" for stage in STAGES}
    spared_router = rng.choice(ROUTER_NAMES)
    others = tuple(name for name in ROUTER_NAMES if name != spared_router)
    hosts = [name for name in HOSTS if name not in spared]
    faulty = [*hosts, *others * 2]
    links = [(router, host) for router in ROUTER_NAMES for host in HOSTS]
    links += [(client, router) for client in CLIENT_NAMES for router in ROUTER_NAMES] * 2
    links += [(one, other) for one in HOSTS for other in HOSTS if one[0] + other[0] in ("ab", "bc", "ca")]
    links += [*zip(hosts, hosts[1:] + hosts[:1], strict=True)] * 3  # the path of most requests
    safe = spared | {spared_router, *CLIENT_NAMES}
    harmed_links = [ends for ends in links if not set(ends) <= safe]
    deploy_at_s = rng.uniform(0, BEGIN_S) if seed % DEPLOY_EVERY == 0 and not is_scripted else None
    faults, is_partitioned = list[PlannedFault](), False
    if is_alone := seed % ALONE_EVERY == ALONE_AT:
        only = rng.choice(sorted(spared))
        other, at_s = next(name for name in hosts if name[0] == only[0]), rng.uniform(0.5, BEGIN_S)
        faults.append(PlannedFault("kill", (other,), 0.0, GONE_S))
        if is_partitioned := rng.random() < 0.5:
            times_s = at_s, at_s + rng.uniform(*PARTITION_S)
            ends = [(CLIENT_NAMES[0], router) for router in ROUTER_NAMES]
            faults += [PlannedFault("reset", each, then_s, 0.0) for each, then_s in zip(ends, times_s, strict=True)]
            faults.append(PlannedFault("slow", (only,), 0.0, KINDS["slow"].max_s, SLOW_ALONE))
        else:
            faults.append(PlannedFault("freeze", (only,), at_s, rng.uniform(0.5, 3.0)))
    count = int(not is_partitioned) if is_alone else rng.randint(1, MAX_FAULTS)
    if seed % LIE_EVERY == LIE_AT and not is_scripted:  # an audit finds nothing if other hosts fail it
        kind, count = "lie", 0
        length_s = rng.uniform(KINDS[kind].min_s, KINDS[kind].max_s)
        faults.append(PlannedFault(kind, (rng.choice(hosts),), rng.uniform(0, BEGIN_S), length_s))
    kinds = {name: kind.weight for name, kind in KINDS.items() if not (is_alone and name == "flap")}
    if deploy_at_s is not None:
        kinds |= dict.fromkeys(("replace", "power", "torn", "no-room"), kinds["kill"])
    any_host, any_client, any_process = ([(name,) for name in names] for names in (hosts, CLIENT_NAMES, faulty))
    targets_of: dict[str, Sequence[tuple[str, ...]]] = {
        **dict.fromkeys(("kill", "freeze", "jump", "untrusted", "power", "torn", "no-room"), any_process),
        **dict.fromkeys(("replace", "full", "broken", "slow", "token"), any_host),
        **dict.fromkeys(("cut", "one-way"), harmed_links),
        **dict.fromkeys(("reset", "half-open", "slow-link"), links),
        "flap": [ends for ends in harmed_links if ends[1] in HOSTS],
        "echo": [(name,) for name in HOSTS],
    }
    for _ in range(count):
        (kind,) = rng.choices(list(kinds), list(kinds.values()))
        if kind == "broken":  # one per schedule: a request has three tries when hosts report what no host may
            del kinds[kind]
        targets = rng.choice(targets_of.get(kind, any_client))
        strength = {"slow-link": SLOW_LINK_S, "jump": rng.uniform(*JUMP_S)}.get(kind, 0.0)
        if kind == "slow":
            strength = rng.choice((SLOW[0], rng.uniform(*SLOW[1])))
        elif kind == "torn":
            strength = rng.uniform(0, WRITES)
        if kind != "half-open" and rng.random() < 0.5:  # choose the direction of the link to cut
            targets = targets[::-1]
        at_s, length_s = rng.uniform(0, BEGIN_S), rng.uniform(KINDS[kind].min_s, KINDS[kind].max_s)
        if deploy_at_s is not None and kind == "replace":
            at_s = deploy_at_s + rng.uniform(*DEPLOYED_S)
        elif deploy_at_s is not None and rng.random() < 0.5:
            at_s += deploy_at_s
        faults.append(PlannedFault(kind, targets, at_s, length_s, strength))
    requests = [[Asked(rng.randrange(cases), rng.uniform(0, 0.5)) for _ in range(REQUESTS)] for _ in CLIENT_NAMES]
    if any(fault.length_s > KNOWN_S or (fault.kind == "replace" and fault.at_s > BEGIN_S) for fault in faults):
        requests[0][-1] = Asked(requests[0][-1].case, rng.uniform(*LATE_S))
    sets = [(spared_router,), (spared_router, *others), *[(*others, spared_router)] * 2]
    known = (ROUTER_NAMES if is_partitioned else rng.choice(sets), *(rng.choice(sets) for _ in CLIENT_NAMES[1:]))
    second_tries = 0.0 if is_alone else (0.0, 1.0, HEDGES, HEDGES)[int(4 * rng.random())]
    if seed % DATE_EVERY == DATE_AT:
        times_s = rng.uniform(0, BEGIN_S), rng.uniform(KINDS["day"].min_s, KINDS["day"].max_s)
        faults.append(PlannedFault(rng.choice(list(AHEAD_S)), (rng.choice(faulty),), *times_s))
    if seed % MOVE_EVERY == MOVE_AT and not is_scripted:
        times_s = rng.uniform(0, BEGIN_S), rng.uniform(KINDS["move"].min_s, KINDS["move"].max_s)
        faults.append(PlannedFault("move", (rng.choice(hosts),), *times_s))
    faults.sort(key=lambda fault: fault.at_s)
    draws = seed % DRAW_EVERY == DRAW_AT and not is_scripted
    planned = tuple(map(tuple, requests)), known, tuple(faults), deploy_at_s
    return Schedule(seed, *planned, draws=draws, second_tries=second_tries)


def _training(seed: int, rng: random.Random) -> Schedule:
    """Faults of a training: of any process, and of the links between workers and their coordinator."""
    faults = []
    for kind in rng.choices(TRAINING_KINDS, k=rng.randint(1, MAX_FAULTS)):
        targets: tuple[str, ...] = (rng.choice(WORKERS), COORDINATOR)[:: rng.choice((1, -1))]
        if kind == "lie" or kind in COORDINATOR_KINDS:
            targets = (COORDINATOR if kind in COORDINATOR_KINDS else rng.choice(WORKERS),)
        elif kind in ("kill", "freeze", "jump", "untrusted"):
            targets = (rng.choice((COORDINATOR, *WORKERS)),)
        at_s, length_s = rng.uniform(0, BEGIN_S), rng.uniform(KINDS[kind].min_s, KINDS[kind].max_s)
        drawn = {"jump": rng.uniform(*JUMP_S), "torn": rng.uniform(0, WRITES)}
        strength = {"slow-link": SLOW_LINK_S, **drawn}.get(kind, 0.0)
        faults.append(PlannedFault(kind, targets, at_s, length_s, strength))
    return Schedule(seed, (), (), tuple(sorted(faults, key=lambda fault: fault.at_s)), trains=True)
