"""Random sweeps are computed again by other hosts: one that lies is named and taken out.

An audited sweep goes hop by hop to each of its hosts and to a replica with the same blocks, from the router. Where the
two disagree by more than rounding, a third opinion decides: another replica, or the router itself where it has the
checkpoint. A host that lies only where nobody asks it alone is found by sending the sweep round again with each host
in turn left out. Nobody is accused who could be honest, if one host of those asked lies, however seldom.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from serving.evidence import all_agree, same_result
from serving.link import HostLink, Weights
from serving.paths import Path
from serving.witness import Witness
from stages.admission import check_passages
from stages.alphabet import BYTES, Alphabet
from stages.errors import OnesweepError
from stages.hop import Outcome
from stages.refusal import Refusal
from stages.v1 import stage_pb2

log = logging.getLogger(__name__)


@dataclass
class AuditCounters:
    """What audits cost, and found."""

    sweeps: int = 0
    """That could have been audited."""
    audited: int = 0
    hops: int = 0
    """Computed again."""
    compute_ms: float = 0.0
    """Of hosts, for audits."""
    liars: int = 0


class Replicas(Protocol):
    """What an audit needs of the ring."""

    links: list[HostLink]

    def spawn(self, job: Coroutine[Any, Any, None]) -> None: ...

    async def push_round(self, path: Path, hops: Sequence[stage_pb2.Hop]) -> stage_pb2.Event: ...

    def accuse(self, link: HostLink, reason: str) -> None: ...


class Auditor:
    """Audits a share of all sweeps."""

    def __init__(self, ring: Replicas, share: float, witness: Witness | None, seed: int | None = None) -> None:
        """:param share: of sweeps that are audited; 0 = none.
        :param witness: the router's own computation, if it has the checkpoint."""
        self.ring, self.share, self.witness = ring, share, witness
        self.counters = AuditCounters()
        self._random = random.Random(secrets.randbits(64) if seed is None else seed)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="witness")

    def picks(self) -> bool:
        """Whether the sweep that just came back is to be audited."""
        self.counters.sweeps += 1
        return self._random.random() < self.share

    async def audit(
        self,
        path: Path,
        weights: Weights,
        opening: Sequence[stage_pb2.Hop],
        event: stage_pb2.Event,
        alphabet: Alphabet = BYTES,
    ) -> bool:
        """Compute a sweep again; False when it was wrong. Who lied is taken out, where that can be told.

        :param opening: the sweep's first hop, or its pieces, for hosts that have read nothing yet.
        :param event: what it ended in.
        :param alphabet: that the model reads.

        Where hosts fail meanwhile, the audit ends without a finding.
        """
        if not any(self._replicas(link, weights) for link in path):
            return True
        self.counters.audited += 1
        try:
            return await self._audit(path, weights, opening, event, alphabet)
        except Refusal as refusal:
            log.info("an audit was given up: %s", refusal.message)
            return True

    async def _audit(
        self, path: Path, weights: Weights, opening: Sequence[stage_pb2.Hop], event: stage_pb2.Event, alphabet: Alphabet
    ) -> bool:
        hops, compared = opening, 0
        outcomes: Sequence[Outcome] = opening
        for link in path:
            others = self._replicas(link, weights)
            try:
                outcomes = await self._ask(link, hops)
            except Refusal:  # what a liar might do, too: the end will tell
                outcomes = await self._ask_others(link, hops, others, alphabet)
                compared += 1
                others = []
            for other in others[:1]:
                theirs = await self._ask(other, hops)
                compared += 1
                if not all_agree(outcomes, theirs, alphabet):
                    told = (link, outcomes), (other, theirs)
                    guilty, outcomes = await self._judge(hops, *told, others[1:], alphabet)
                    if guilty is link:
                        return False
            if isinstance(outcomes[-1], stage_pb2.Event):
                break
            hops = [outcome for outcome in outcomes if isinstance(outcome, stage_pb2.Hop)]
        if isinstance(result := outcomes[-1], stage_pb2.Hop):
            raise Refusal(grpc.StatusCode.INTERNAL, "the last host handed a hop on instead of ending it")
        if same_result(result, event) or not compared:
            return True
        await self._find_by_leaving_out(path, weights, opening, result)
        return False

    async def _ask(self, link: HostLink, hops: Sequence[stage_pb2.Hop]) -> Sequence[Outcome]:
        """What a host makes of hops, one after the other, in a session that is freed at once. Raises Refusal."""
        session = secrets.token_hex(16)
        try:
            return [await self._ask_one(link, hop, session) for hop in hops]
        except TimeoutError:
            raise Refusal(
                grpc.StatusCode.UNAVAILABLE, f"{link.relay.host} did not answer within {link.relay.hop_timeout_s:g} s"
            ) from None
        finally:
            self.ring.spawn(link.release(session))

    async def _ask_one(self, link: HostLink, hop: stage_pb2.Hop, session: str) -> Outcome:
        question = stage_pb2.Hop()
        question.CopyFrom(hop)
        question.session = session
        del question.passages[:]
        async with asyncio.timeout(link.relay.hop_timeout_s):
            outcome = await link.relay.run(question, onward=False)
        check_passages(outcome.passages)
        self.counters.hops += 1
        self.counters.compute_ms += outcome.passages[-1].compute_ms if outcome.passages else 0.0
        return outcome

    async def _ask_others(
        self, link: HostLink, hops: Sequence[stage_pb2.Hop], others: list[HostLink], alphabet: Alphabet
    ) -> Sequence[Outcome]:
        """What `link`, which does not answer, should have said: two must say so. Raises Refusal."""
        for other in others[:1]:
            theirs = await self._ask(other, hops)
            third = await self._third(hops, link, others[1:])
            if third is not None and all_agree(theirs, third, alphabet):
                return theirs
        raise Refusal(grpc.StatusCode.UNAVAILABLE, f"host {link.entry.name} cannot be asked alone")

    async def _judge(
        self,
        hops: Sequence[stage_pb2.Hop],
        mine: tuple[HostLink, Sequence[Outcome]],
        theirs: tuple[HostLink, Sequence[Outcome]],
        others: list[HostLink],
        alphabet: Alphabet,
    ) -> tuple[HostLink | None, Sequence[Outcome]]:
        """Which of two hosts that disagree lied, if that can be told, and the answers to go on with."""
        third = await self._third(hops, mine[0], others)
        for (link, outcomes), (_, right) in ((mine, theirs), (theirs, mine)):
            if third is not None and all_agree(right, third, alphabet) and not all_agree(outcomes, third, alphabet):
                self._accuse(link, "it computed something else than two others")
                return link, right
        log.error(
            "hosts %s and %s disagree on a hop, and nobody can tell which of them is wrong: start the router with "
            "--checkpoint, or add a third replica",
            mine[0].entry.name,
            theirs[0].entry.name,
        )
        return None, mine[1]

    async def _third(
        self, hops: Sequence[stage_pb2.Hop], link: HostLink, others: list[HostLink]
    ) -> Sequence[Outcome] | None:
        try:
            if self.witness is not None and self.witness.knows(link.entry, hops[0].digest):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._thread, self.witness.outcomes, hops, link.entry)
        except OnesweepError as error:
            log.warning("the router's own checkpoint cannot be used for audits: %s", error)
        return await self._ask(others[0], hops) if others else None

    async def _find_by_leaving_out(
        self, path: Path, weights: Weights, opening: Sequence[stage_pb2.Hop], right: stage_pb2.Event
    ) -> None:
        """Take the host of `path` out that lied in the ring, and not when it was asked alone."""
        names = ", ".join(link.entry.name for link in path)
        if same_result(await self.ring.push_round(path, opening), right):
            log.warning("a sweep over %s was wrong once, and right when it was sent again", names)
            return
        # the liar had a part in every sweep that was wrong; one that was right tells little: it may lie now and then
        suspects, mended = set(path), set[HostLink]()
        for index, link in enumerate(path):
            for other in self._replicas(link, weights)[:1]:
                around = (*path[:index], other, *path[index + 1 :])
                if same_result(await self.ring.push_round(around, opening), right):
                    mended.add(link)
                else:
                    suspects &= set(around)
        if len(suspects) == 1 and suspects <= mended:
            self._accuse(suspects.pop(), "its part of a sweep was wrong, and right when it was asked alone")
        else:
            log.error("a sweep over %s was wrong, and nobody can tell why", names)

    def _accuse(self, link: HostLink, reason: str) -> None:
        if not link.accused:  # by another audit, meanwhile
            self.counters.liars += 1
            self.ring.accuse(link, reason)

    def _replicas(self, link: HostLink, weights: Weights) -> list[HostLink]:
        """Other hosts with the same blocks and weights."""
        return [
            other
            for other in self.ring.links
            if other is not link
            and other.entry.blocks == link.entry.blocks
            and not other.problem
            and weights in other.held
        ]
