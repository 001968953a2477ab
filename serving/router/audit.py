"""Audits: other hosts recompute a share of all answers, and a host that lies is named and quarantined.

An audited answer travels like any other work through hosts that did not compute it, and must come out the same. So it
does not help a host to tell audits from work: other hosts repeat its own work, and it is not asked. When
an answer was wrong, a liar is on its path. The auditor intersects the paths of wrong answers, and sends requests over
paths that split the suspects, until one host is left. If one of the hosts asked lies, however seldom, no host that
could be honest is quarantined. A faulty host gets no work for a while, and the hosts behind it forget its work.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
import time
from collections.abc import AsyncGenerator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from serving.router.answer import AuditedAnswer, same_results
from serving.router.host_link import Attempt, HostLink, HostPath
from stages.checkpoint.files import replace_file
from stages.clock import monotonic
from stages.errors import OnesweepError
from stages.host.prefixes import MAX_FAULTY
from stages.v1 import stage_pb2
from stages.wire.messages import check_timings, seconds_until
from stages.wire.status import StatusError, data_loss, deadline_exceeded, unavailable

if TYPE_CHECKING:
    from serving.modes.base import Generation, Mode
    from serving.router.accounting import Account
    from serving.router.own_models import ReferenceVerifier
    from serving.router.ring import Ring

log = logging.getLogger(__name__)

Results = list[stage_pb2.Event]


def same_kind(one: Iterable[HostLink], other: Iterable[HostLink]) -> bool:
    """True if machines of one kind, as they report it, hold each part of the model: they compute the same bits."""
    kinds = [
        {part: link.info.machine if link.info else "" for link in path for part in link.entry.blocks}
        for path in (one, other)
    ]
    return kinds[0] == kinds[1]


@dataclass
class AuditCounters:
    """Cost and findings of audits."""

    sweeps: int = 0  # sweeps that could have been audited
    audited: int = 0
    hops: int = 0  # recomputed
    compute_ms: float = 0.0  # the hosts' compute time for audits
    faulty_hosts: int = 0


# Audits without a finding that clear suspects. A host that lies in one sweep of a hundred is cleared by 0.7 %.
CLEARED_AFTER = 500


@dataclass
class Suspicion:
    """Names of the hosts that were on the path of every recent wrong answer."""

    names: frozenset[str] = frozenset()
    left: int = 0  # audits without a finding until they are cleared

    def add(self, hosts: frozenset[str]) -> None:
        """Record a wrong answer of `hosts`. If none of them was suspected, the suspicion starts over."""
        self.names, self.left = self.names & hosts or hosts, CLEARED_AFTER

    def passed(self) -> None:
        """Record a right answer."""
        self.left -= 1
        if self.left <= 0:
            self.names = frozenset()


class Auditor:
    """Audits a share of all answers."""

    def __init__(self, ring: Ring, share: float, verifier: ReferenceVerifier | None, seed: int | None = None) -> None:
        """:param share: of answers that are audited; 0 = none.
        :param verifier: recomputes answers on the router, if it has the checkpoint."""
        self.ring, self.share, self.verifier = ring, share, verifier
        self.counters = AuditCounters()
        self._random = random.Random(secrets.randbits(64) if seed is None else seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verifier")
        # Guards the suspicion: two findings must not mix.
        self._judging = asyncio.Lock()
        self.suspicion = Suspicion()
        self._warned_unlike = False

    def picks(self, answer: AuditedAnswer) -> bool:
        """True if an answer is to be audited: this share of all, and every one of a suspect."""
        return bool(self.suspicion.names & _names(answer.hosts)) or self._random.random() < self.share

    def to_avoid(self) -> set[str]:
        """Addresses to avoid, a random half of the suspects each time: the next wrong answer narrows them down."""
        names = sorted(self.suspicion.names)
        half = self._random.sample(names, len(names) // 2 if len(names) > 1 else self._random.randint(0, len(names)))
        return {link.entry.address for link in self.ring.links if link.entry.name in half}

    async def audit(self, answer: AuditedAnswer) -> bool:
        """Have other hosts recompute an answer; False if it was wrong. A liar that can be named is quarantined.

        If hosts fail meanwhile, the audit ends without a finding.
        """
        other = answer.choose(_addresses(answer.hosts))
        if other is not None and answer.hosts.issuperset(other):  # the answer may have moved over every host
            other = answer.choose(_addresses(answer.path))
        if other is None or set(other) == set(answer.path):
            return True
        if not same_kind(answer.hosts, other):
            if not self._warned_unlike:
                log.warning("answers of unlike machines are not audited: put replicas on machines of one kind")
            self._warned_unlike = True
            return True
        self.counters.audited += len(answer.results)
        try:
            return await self._audit(answer, other)
        except StatusError as refusal:
            log.info("an audit was abandoned: %s", refusal.message)
            return True

    async def _audit(self, answer: AuditedAnswer, other: HostPath) -> bool:
        theirs = await self._ask(answer, other)
        if same_results(answer.comparable(answer.results), theirs, exact=True):
            self.suspicion.passed()
            return True
        if (right := await self._right(answer, other, theirs)) is None:
            names = " and ".join(", ".join(sorted(_names(path))) for path in (answer.hosts, other))
            log.error(
                "hosts %s disagree on an answer, and nothing shows which is wrong: start the router with "
                "--checkpoint, or add a third replica",
                names,
            )
            return True
        is_right = right is not theirs
        wrong, path = (frozenset(other), other) if is_right else (answer.hosts, answer.path)
        log.warning("an answer from %s was wrong", ", ".join(sorted(_names(wrong))))
        async with self._judging:
            if not any(link.quarantined for link in wrong):  # by another audit, meanwhile
                await self._suspect(answer, wrong, path, right)
        return is_right

    async def _right(self, answer: AuditedAnswer, other: HostPath, theirs: Results) -> Results | None:
        """The right results, by a third opinion; None if that does not decide."""
        mine, own = answer.comparable(answer.results), True
        third, path = await self._own(answer), HostPath()
        if third is None:
            for avoid in (answer.hosts.union(other), other):
                path = answer.choose(_addresses(avoid)) or ()
                if path and not set(path).intersection(other):
                    third, own = await self._ask(answer, path), answer.hosts.isdisjoint(path)
                    break
        for exact in (True, False):
            agreeing = [each for each in (mine, theirs) if third is not None and same_results(each, third, exact)]
            if len(agreeing) == 1:
                return agreeing[0] if own or agreeing[0] is theirs else None
        return None

    async def _own(self, answer: AuditedAnswer) -> Results | None:
        """The router's own results, if it can compute them."""
        steps = answer.steps(Attempt(answer.path, lambda *_: None), self._random)
        try:
            if self.verifier is not None and self.verifier.find(steps[0][0].digest):
                loop = asyncio.get_running_loop()
                return answer.comparable(await loop.run_in_executor(self._thread, self.verifier.results, steps))
        except OnesweepError as error:
            log.warning("the router's own checkpoint cannot be used for audits: %s", error)
        return None

    async def _suspect(self, answer: AuditedAnswer, wrong: frozenset[HostLink], path: HostPath, right: Results) -> None:
        """Record a wrong answer of the hosts `wrong`, and quarantine the liar if it can be named."""
        suspicion, cleared = self.suspicion, set[str]()
        suspicion.add(_names(wrong))
        # A careless liar shows at once: answers are wrong on each path with it, and on no other.
        for index in self._random.sample(range(len(path)), len(path)):
            if (replica := self._replica(path[index])) is not None:
                around = (*path[:index], replica, *path[index + 1 :])
                try:
                    if same_results(await self._ask(answer, around), right):
                        cleared.add(path[index].entry.name)
                    else:
                        suspicion.add(_names(around))
                except StatusError:  # no evidence either way
                    continue
        names = suspicion.names
        liar = next((link for link in self.ring.links if link.entry.name in names), None)
        if len(names) > 1 or liar is None or not names <= cleared:
            log.error("one of the hosts %s is faulty: further answers will tell which", ", ".join(sorted(names)))
            return
        self.counters.faulty_hosts += 1
        self.ring.quarantine(liar, "every wrong answer passed through it")
        suspicion.names = frozenset()

    async def _ask(self, answer: AuditedAnswer, path: HostPath) -> Results:
        """Send an answer's work over a path like any other work, and return the results. Raises StatusError."""
        arrived = asyncio.Queue[stage_pb2.Event](MAX_UNREAD)
        attempt = self.ring.begin(path, lambda _, event: None if arrived.full() else arrived.put_nowait(event))
        results = Results()
        try:
            for hops in answer.steps(attempt, self._random):
                attempt.send(hops)
                events = Results()
                while (whole := answer.received(events, attempt.results)) is None:
                    wait_s = min(self.ring.settings.hop_timeout_s + answer.took_s, seconds_until(answer.due_at))
                    async with asyncio.timeout(wait_s):
                        event = await arrived.get()
                    if event.WhichOneof("outcome") == "fault":
                        raise StatusError.numbered(event.fault.code, event.fault.message)
                    if event.pictures.preview:
                        continue
                    check_timings(event.timings)
                    self.counters.compute_ms += sum(timing.compute_ms for timing in event.timings)
                    events.append(event)
                self.counters.hops += len(hops) * len(path)
                results += whole
        except TimeoutError:
            raise deadline_exceeded("no result arrived for an audited answer") from None
        finally:
            self.ring.end(attempt)
        return answer.comparable(results)

    def _replica(self, link: HostLink) -> HostLink | None:
        fit = (
            other
            for other in self.ring.links
            if other is not link
            and other.entry.blocks == link.entry.blocks
            and not other.problem
            and other.held.keys() & link.held.keys()
        )
        return next(fit, None)


# Most unread events of one audit; no sound host sends more before they are read.
MAX_UNREAD = 4096


def _names(hosts: Iterable[HostLink]) -> frozenset[str]:
    return frozenset(link.entry.name for link in hosts)


def _addresses(hosts: Iterable[HostLink]) -> set[str]:
    return {link.entry.address for link in hosts}


MAX_TRIES = 3
# If no host could be named, another host may have joined by then.
RETRY_PAUSE_S = 0.5

WRONG_SO_FAR = "a host was faulty, and the text so far was wrong: send the request again"


class AuditFailed(Exception):
    """A faulty host contributed to this request: the whole text must be generated again."""


async def retry_after_audit(
    mode: Mode, generation: Generation, account: Account, whole: bool = False
) -> AsyncGenerator[bytes | None, None]:
    """Yield pieces of `mode`'s text for `generation`, none of them from hosts that an audit found to lie meanwhile.

    :param whole: the caller has handed nothing out; a None among the pieces says that all so far were wrong.

    Raises StatusError: DATA_LOSS if text already handed out was wrong.
    """
    sent = b""
    for _ in range(MAX_TRIES):
        written = b""
        try:
            async with aclosing(mode.generate(generation, account)) as pieces:
                async for piece in pieces:
                    written += piece
                    if not (written.startswith(sent) or sent.startswith(written)):
                        if not whole:
                            raise data_loss(WRONG_SO_FAR)
                        sent = b""
                        yield None
                    if len(written) > len(sent):
                        fresh, sent = written[len(sent) :], written
                        yield fresh
            return
        except AuditFailed:
            if not whole and generation.logprobs is not None and (sent or generation.score_prompt):
                raise data_loss(WRONG_SO_FAR) from None  # the client has its logprobs already, and they were wrong too
            account.begin_again()
            await asyncio.sleep(RETRY_PAUSE_S)
    raise unavailable(f"a host of this request was faulty {MAX_TRIES} times: check the hosts")


MAX_HOURS = 32.0
FINDINGS_NAME = "faulty_hosts.json"


@dataclass(frozen=True)
class Finding:
    """A fault that audits found in one host."""

    reason: str
    until: float  # Unix time; no work before
    times: int  # how often it was found faulty
    instances: tuple[str, ...]  # its processes, the latest last


class Quarantine:
    """Findings by host name: a restart of the host or of the router does not lift them."""

    def __init__(self, path: Path | None = None) -> None:
        """:param path: the file that stores them; None: nothing is stored."""
        self._path = path
        self._findings = _read(path) if path is not None and path.exists() else {}

    def add(self, name: str, reason: str, instance: str) -> float:
        """Record a finding; returns the hours without work: one for the first, twice as many for each further one.

        A passing fault, or a tie that machines of two kinds break differently, costs an hour; a liar gets no work."""
        before = self._findings.get(name)
        times = before.times if before else 0
        hours = min(2.0**times, MAX_HOURS)
        instances = [each for each in (*(before.instances if before else ()), instance) if each]
        sentence = f"{reason}; check its machine and weights; it gets no work for {hours:.0f} h"
        kept = tuple(dict.fromkeys(instances))[-MAX_FAULTY:]
        self._findings[name] = Finding(sentence, time.time() + hours * 3600, times + 1, kept)
        self._write()
        return hours

    def of(self, name: str) -> tuple[str, float]:
        """The finding about a host, and the monotonic time until which it gets no work; an empty text without one."""
        if (found := self._findings.get(name)) is None:
            return "", 0.0
        return found.reason, monotonic() + found.until - time.time()

    @property
    def instances(self) -> list[str]:
        """Processes of all faulty hosts, the latest last: hosts drop cached work that passed through these."""
        return [each for found in self._findings.values() for each in found.instances][-MAX_FAULTY:]

    def _write(self) -> None:
        if self._path is None:
            return
        text = json.dumps({name: asdict(found) for name, found in self._findings.items()}, indent=2)
        try:
            replace_file(self._path, lambda path: path.write_text(text, encoding="utf-8"))
        except OnesweepError as error:
            log.warning("findings about faulty hosts will be lost when this process exits: %s", error)


def _read(path: Path) -> dict[str, Finding]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            name: Finding(str(each["reason"]), float(each["until"]), int(each["times"]), tuple(each["instances"]))
            for name, each in stored.items()
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        log.warning("%s cannot be read, and is rewritten: %s", path, error)
        return {}
