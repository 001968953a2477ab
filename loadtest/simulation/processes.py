"""The real parts of hosts and routers in schedules: tiny models, virtual time, and rules for every try."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha1
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from loadtest.simulation.loop import CALLER, here
from loadtest.simulation.schedule import STAGES, PlannedFault
from serving.router.active_release import RouterParts
from serving.router.host_link import Attempt, HostLink, HostPath
from serving.router.journal import MAX_PAUSE_S, PAUSE_S
from serving.router.own_models import ReferenceVerifier
from serving.router.paths import HEDGE_SHARE, SUSPECT_S
from serving.router.ring import Ring
from serving.router.session import Session
from stages.backends import Backend
from stages.checkpoint.checkpoint import save_part, save_parts, write_manifest
from stages.checkpoint.gate import PROBE_TEXT
from stages.checkpoint.manifest import Manifest
from stages.checkpoint.release_store import ReleaseManifest, read_release_manifest
from stages.clock import monotonic
from stages.host.drafter import Drafter
from stages.host.host import Host
from stages.host.loading import Loader
from stages.host.next_hosts import Subscribers
from stages.host.parts import Parts, load_parts
from stages.host.plan import HostPlan, plan_host
from stages.model.architecture import Architecture, PictureArchitecture
from stages.model.block import Block
from stages.model.partition import NoisePartition, equal_probability
from stages.model.pipeline import ArModel
from stages.model.randomness import Codes
from stages.pictures.part import PictureKind, PicturePart
from stages.v1 import stage_pb2
from stages.wire.messages import work_of
from stages.wire.status import StatusError, internal

PASS_S, LOAD_S = 0.002, 0.3  # virtual time of a pass, and of a host's loading of a release
SIGMAS = 0.002, 80.0  # least and largest, of pictures
PICTURES = PictureArchitecture(
    height=8, width=8, channels=1, classes=("zero", "one"), patch=2, layers=1, features=32, heads=2, condition_dim=32
)
ARCHITECTURE = Architecture(parts=3, layers=1, width=32, heads=2, context_length=512, code_dim=32, condition_dim=16)


class Remembered:
    """A runner that computes each distinct input once, where the input includes all arguments and every number of the
    visible caches. Schedules request the same texts again and again."""

    def __init__(self, runner: Any) -> None:  # noqa: ANN401 - a BlockRunner, a StageRunner or a PictureRunner
        self._runner, self._known = runner, dict[bytes, tuple[list[Any], list[Any]]]()
        for name in ("read", "next_byte", "denoise", "branch", "evaluate"):
            setattr(self, name, partial(self._once, name))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._runner, name)

    def _once(self, name: str, pieces: Sequence[Any]) -> list[Any]:
        caches = [cache for piece in pieces for cache in getattr(piece, "caches", ())]
        before = [cache.length for cache in caches]
        values = [x for piece in pieces for x in ([piece] if isinstance(piece, torch.Tensor) else vars(piece).values())]
        held = (array[:, :past] for cache, past in zip(caches, before, strict=True) for array in cache.arrays)
        given = map(np.asarray, (name, *(x for x in values if not isinstance(x, list)), *held))
        key = sha1(b"".join(repr(x.shape).encode() + x.tobytes() for x in given), usedforsecurity=False).digest()
        if key not in self._known:
            results, ends = getattr(self._runner, name)(pieces), zip(caches, before, strict=True)
            added = [(c.length, *(x[:, past : c.length].copy() for x in c.arrays)) for c, past in ends]
            self._known[key] = results, added
        results, added = self._known[key]
        for cache, past, (end, *new) in zip(caches, before, added, strict=True):
            cache.length = end
            for array, rows in zip(cache.arrays, new, strict=True):
                array[:, past:end] = rows
        return [x.clone() if isinstance(x, torch.Tensor) else x for x in results]


@dataclass(frozen=True)
class TinyRelease:
    """A tiny model with random weights: its files, and the parts that hosts and routers hold in memory."""

    contents: ReleaseManifest
    directory: Path
    backend: Backend
    parts: Sequence[Parts]  # of each host of a ring
    router: RouterParts
    verifier: ReferenceVerifier  # reads it once for all schedules

    @classmethod
    def made(cls, directory: Path, seed: int) -> Self:
        """:param directory: for its files."""
        a, generator = ARCHITECTURE, torch.Generator().manual_seed(seed)
        codes, partition = Codes(0, a.code_dim), NoisePartition("uniform", (8.0, 1.5, 0.6, 0.2))
        write_manifest(directory / "chain", Manifest("chain", a, (None,) * a.parts, codes, partition, PROBE_TEXT))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for index in range(a.parts):
                save_part(directory / "chain", _shaken(Block(a, index, codes), generator))
            for name, parts in (("ar", a.parts), ("local", 1)):
                model = _shaken(ArModel(replace(a, parts=parts)), generator)
                manifest = Manifest("ar", model.architecture, (None,) * parts, probe_text=PROBE_TEXT)
                write_manifest(directory / name, manifest)
                save_parts(directory / name, model.stages)
        return cls._read(directory)

    @classmethod
    def drawing(cls, directory: Path) -> Self:
        """A release that draws, in modes chain and steps."""
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            kinds: dict[PictureKind, int] = {"chain": PICTURES.parts, "steps": 1}
            for kind, blocks in kinds.items():
                partition = equal_probability(blocks, *SIGMAS)
                manifest = Manifest(kind, PICTURES, (None,) * PICTURES.parts, partition=partition)
                write_manifest(directory / kind, manifest)
                indices = range(PICTURES.parts)
                save_parts(directory / kind, [_shaken(PicturePart(PICTURES, i, kind), generator) for i in indices])
        return cls._read(directory)

    @classmethod
    def _read(cls, directory: Path) -> Self:
        backend = Backend()
        parts_of = [load_parts(plan_host(directory, (block,)), backend) for block in range(len(STAGES))]
        contents, router = read_release_manifest(directory), RouterParts.read(directory)
        for runners in (runners for parts in parts_of for runners in parts.runners.values()):
            runners |= {index: Remembered(runner) for index, runner in runners.items()}
        return cls(contents, directory, backend, parts_of, router, ReferenceVerifier(directory))


class VirtualLoader(Loader):
    """A loader that returns parts already in memory, in a fixed virtual time."""

    known: Sequence[TinyRelease] = ()
    on_load: Callable[[], None]

    async def _load_in_background(self, plan: HostPlan) -> Parts:
        self.on_load()
        await asyncio.sleep(LOAD_S)
        return held(self.known, plan)


def held(known: Sequence[TinyRelease], plan: HostPlan) -> Parts:
    """The parts that a host with this plan holds, from whichever release has them, with its own drafter."""
    parts = next(p for each in known if (p := each.parts[plan.blocks[0]]).plan.weights == plan.weights)
    if (drafter := parts.ar_drafter) is not None:  # it adapts the length of its drafts
        parts = replace(parts, ar_drafter=Drafter(drafter.vocabulary, drafter.model))
    return parts


def _shaken(module: Any, generator: torch.Generator) -> Any:  # noqa: ANN401 - a Block, an ArModel or a PicturePart
    """Enlarge the weights so that every byte of the context affects the output."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


class SimulatedHost(Host):
    """A host whose passes take a fixed virtual time on the event loop."""

    pass_s, is_broken = PASS_S, False
    is_liar: Callable[[], bool] = bool  # no
    problems: list[str]
    _has_pass = False

    def _go(self) -> None:
        if not self._has_pass and len(self.scheduler):
            self._has_pass = True
            here().call_at(here().loop.now_s + self.pass_s, self._pass)

    def _pass(self) -> None:
        self._has_pass = False
        ended = self.scheduler.turn()
        for job in ended if self.is_broken else ():
            job.result = internal("a hop failed")
        for job in ended if self.is_liar() else ():
            for output in job.result, job.work.result:
                what: Any = work_of(output) if isinstance(output, stage_pb2.Hop) else output
                for name in ("text", "hidden", "estimate"):
                    if value := getattr(what, name, b""):
                        setattr(what, name, bytes(each ^ 1 for each in value))
        self._finish(ended)
        self._go()

    def change(self, fault: PlannedFault, begins: bool) -> None:
        """Begin or end a fault of the host's behaviour."""
        match fault.kind:
            case "slow":
                self.pass_s = PASS_S * (fault.strength if begins else 1.0)
            case "broken":
                self.is_broken = begins
            case "full":
                self.sessions.budget_bytes = 0 if begins else self.settings.session_mb << 20
            case "echo":
                once: Any = partial(Subscribers.publish, self.subscribers)
                self.subscribers.publish = (lambda *what: (once(*what), once(*what))[0]) if begins else once  # type: ignore[method-assign]

    def _fault(self, hop: stage_pb2.Hop, refusal: StatusError, lost: str = "") -> None:
        super()._fault(hop, refusal, lost)
        if hop.session in self.sessions.sessions:
            self.problems.append(f"{self.settings.name} keeps a session that it reported as over")


Pair = tuple[str, str]  # addresses of a host and the next one


@dataclass(eq=False)
class Try:
    """One try of a request on the hosts of one path."""

    session: Session
    client: str
    router: str
    path: tuple[str, ...]
    begun_s: float  # by the world's clock; all other times by the router's
    begun_at: float
    heard_s: float = 0.0  # when its last result arrived
    number: int = -1  # of that result
    scores: dict[tuple[int, int], bytes] = field(default_factory=dict)  # by result and batch
    beyond: int = 0  # results and faults after its end, from later steps
    is_lost: bool = False  # ended by a fault; later messages about it are not read


class WatchedRing(Ring):
    """A ring that records every try and reports those that break a rule.

    No host without a fault is avoided. A simultaneous second try is for slow ones, and silent hosts are left only if
    there is another path. A link that lost work a moment ago is used only alongside another try or without another
    path; later it counts like any other. Second tries are few, and prefer slow hosts to failed ones.
    """

    def __init__(self, place: str, hit: Collection[str], problems: list[str], **how: Any) -> None:  # noqa: ANN401
        """:param place: the router's name. :param hit: processes hit by faults so far. :param problems: added to."""
        super().__init__(**how)
        self.place, self.hit, self.problems = place, hit, problems
        self.tries = dict[str, Try]()  # by the session's name on the hosts
        self._lost_until, self._suspect_until = dict[Pair, float](), dict[Pair, float]()
        self._unread = dict[Session, dict[Pair, float]]()  # the same, until the session reads of it
        self._is_silent = False  # the router is leaving a silent host
        self._ended_at = dict[Session, float]()  # end of its last try
        self._results = self._second_tries = 0
        self._left = dict[Session, HostPath]()  # paths of silent hosts that requests left without another path

    def begin(self, path: HostPath, receive: Callable[[Attempt, stage_pb2.Event], object]) -> Attempt:
        session: Session | None = getattr(receive, "__self__", None)
        if session is None:  # an audit's
            return super().begin(path, receive)
        self._check(session, path)

        def heard(attempt: Attempt, event: stage_pb2.Event) -> None:
            if self._is_silent:
                self._left[session] = () if self.choose(session.weights) else path
            elif event.fault.lost and not self.tries[attempt.name].is_lost:
                self.tries[attempt.name].is_lost = True
                source = next((link.entry.address for link in path if link.entry.name == event.fault.host), "")
                until_s = self._suspect_until[source, event.fault.lost] = monotonic() + SUSPECT_S
                self._unread.setdefault(session, {})[source, event.fault.lost] = until_s
            receive(attempt, event)

        attempt = super().begin(path, heard)
        names = tuple(link.entry.name for link in path)
        self.tries[attempt.name] = Try(session, CALLER.get(), self.place, names, here().loop.now_s, monotonic())
        return attempt

    def end(self, attempt: Attempt) -> None:
        super().end(attempt)
        if attempt.name in self.tries:
            self._ended_at[self.tries[attempt.name].session] = monotonic()
            self._check_blame(self.tries[attempt.name].session)

    def _check_blame(self, session: Session) -> None:
        avoided = {link.entry.name for link in self.links if link.entry.address in session.tries.blamed}
        if self.place not in self.hit and (innocent := avoided - set(self.hit)):
            self.problems.append(f"{self.place} avoids {', '.join(sorted(innocent))}, hit by no fault")

    def _check(self, session: Session, path: HostPath) -> None:
        self._check_blame(session)
        self._lost_until |= self._unread.pop(session, {})
        tries, now_s, targets, other = session.tries, monotonic(), self._lost_targets(path), path
        begun_at = [self.tries[each.name].begun_at for each in tries.attempts]
        self._second_tries += len(begun_at)
        if begun_at or targets:
            slow = [link.entry.address for each in tries.attempts for link in each.path]
            avoid = [*tries.blamed, *tries.blamed, *slow] if slow else [*tries.blamed, *targets]
            other = self.choose(session.weights, avoid) or path
        addresses, others = ({link.entry.address for link in way} for way in (path, other))
        rules = {
            "begins another try while one has not failed": begun_at
            and (len(begun_at) > 1 or max(tries.failed_on.values(), default=0.0) > max(begun_at)),
            "makes too many second tries": self._second_tries > self.hedging._most + HEDGE_SHARE * self._results,
            "prefers a host that failed to a slow one": begun_at
            and len(addresses & tries.blamed) > len(others & tries.blamed),
            "retries without a pause": tries.count > 1 and not begun_at and now_s < self._ended_at[session] + PAUSE_S,
            "moves a request from silent hosts to the same ones": self._left.pop(session, ()) == path,
            "takes a link that lost work a moment ago": targets
            and not begun_at
            and not others & (targets | tries.blamed)
            and not self._lost_targets(other, *self._unread.values()),  # the router may know of what was not read here
            "avoids a link that lost work long ago": self.place not in self.hit  # otherwise its clock may have jumped
            and any(self._suspect_until.get(pair, 0.0) + MAX_PAUSE_S < now_s for pair in self.suspects.now(now_s)),
        }
        names = " - ".join(link.entry.name for link in path)
        self.problems += [f"{self.place} {what}, on {names}" for what, is_broken in rules.items() if is_broken]

    def _lost_targets(self, path: HostPath, *more: Mapping[Pair, float]) -> set[str]:
        """Target addresses of a path's links that lost work a moment ago; `more`: further links, and until when."""
        addresses = [link.entry.address for link in path]
        pairs = zip(addresses, addresses[1:] + addresses[:1], strict=True)
        return {pair[1] for pair in pairs for lost in (self._lost_until, *more) if lost.get(pair, 0.0) > monotonic()}

    def _deliver(self, event: stage_pb2.Event) -> None:
        seen = self.tries.get(event.session)
        if seen is not None and event.session not in self._attempts:
            seen.beyond += event.number > seen.number
        elif seen is not None and not event.HasField("fault") and not event.pictures.preview:
            self._results += 1
            seen.number, seen.heard_s = max(seen.number, event.number), monotonic()
            if event.scores.nats:
                seen.scores[event.number, event.scores.batch] = event.scores.nats
        super()._deliver(event)

    def _lose(self, link: HostLink, reason: str, is_gone: bool = True) -> None:
        self._is_silent = not is_gone
        super()._lose(link, reason, is_gone)
        self._is_silent = False
