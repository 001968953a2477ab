"""A site: machines that work as one worker. Each makes the gradient of its own text, and all step by the mean."""

# The first machine is the worker that the coordinator knows. As each round begins it lends its weights and optimizer to
# all that are there. A machine that is lost in the middle costs its share of the text; once it is back it waits for the
# next round. torchft's Lighthouse (github.com/pytorch/torchft, 0.2.0) knows who lives, and Gloo adds the gradients.
# torchft's Manager is not used: its servers listen on every address of a machine, it unpickles the state of a peer, and
# it finds that peer by a hostname, which in many networks leads to 127.0.0.1. Here every port is on the machine's own
# address at the site, and a state travels as safetensors. Nothing is encrypted, and nobody shows a token.

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from google.protobuf.json_format import MessageToJson, Parse
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from stages.errors import ConfigError, InputError, Interrupted, ServiceError
from stages.wire.channel import parse_address
from stages.wire.status import StatusError
from trainer.blocks.data import Corpus
from trainer.rounds.codecs import under
from trainer.rounds.parts import Learner
from trainer.rounds.settings import WorkerSettings
from trainer.rounds.worker import join_request, learner_of, spec_of
from trainer.v1 import rounds_pb2

log = logging.getLogger(__name__)

BEAT_S, SILENT_S = 1.0, 10.0  # after such a silence a machine is gone: so long the others wait for one that was killed
STUCK_S = 300.0  # one that lives and makes no step for so long falls silent
LISTEN = timedelta(seconds=5)  # so long a machine that waits takes to stop
CONNECT = timedelta(seconds=15)
EXCHANGE = timedelta(seconds=60)  # how long a step waits for a slow machine
GATHER_S = 120.0  # how long a first machine waits for the others before its first round
FAREWELL_S = 10.0  # time in which the others learn that the run is over
AGAIN_S, LOOK_S = 0.2, 0.05
PIECE = 2**24  # numbers in one exchange
PLACE, TEXT, LIGHTHOUSE = "place", "text", "lighthouse"  # keys of the store, which the first machine has
MODULE, OPTIMIZER, COPY = "module/", "optimizer/", "copy/"  # groups of tensors in a state


class _AwayError(ServiceError):
    """The first machine does not answer, or has another place of the run than before."""


class _BehindError(Exception):
    """The first machine is in another round or step than this one."""


@dataclass(frozen=True)
class Presence:
    """A machine's words as it comes to a meeting. One with a step brings its gradient."""

    machine: int
    arrival: int  # machines that came to the site before it
    place: str  # in the run
    call: int  # meetings that it came to
    state: str  # name of the state that the first machine lent last
    step: int | None
    steps: tuple[int, int]  # of the first machine, where a round begins: those that are made from its state
    over: bool

    def shares_with(self, first: Presence) -> bool:
        """True if it can make the first machine's step, or round that begins."""
        same_step = first.step is None or (self.state, self.step) == (first.state, first.step)
        return self.place == first.place and same_step


class Site:
    """This machine at its site."""

    def __init__(
        self, settings: WorkerSettings, insecure: bool, patience_s: float, asked_to_stop: Callable[[], bool]
    ) -> None:
        """:param insecure: whether the site may have public addresses; :param patience_s: how long to look for the
        first machine. Raises InputError, ServiceError.
        """
        if importlib.util.find_spec("torchft") is None:
            raise InputError("a site needs torchft: pip install 'onesweep[torchft]' (Linux on x86-64 only)")
        if settings.machine >= settings.machines:
            raise InputError(
                f"--machine must be from 0 to {settings.machines - 1} at a site of {settings.machines}, "
                f"not {settings.machine}: give the same --machines on all"
            )
        os.environ.setdefault("RUST_LOG", "error")  # or the Lighthouse logs every heartbeat
        self.settings, self.insecure, self.patience_s = settings, insecure, patience_s
        self.address, self.asked_to_stop = str(settings.site), asked_to_stop
        self.host, self.port = parse_address(self.address, "--site")
        self._name = f"{settings.machine}:{uuid.uuid4().hex}"
        self._place, self._state, self._calls, self.size = "", "", 0, settings.machines
        self._group: Any = None  # connections among those that share a round; None for one alone
        self._left, self._beats, self._made, self._moved_s = threading.Event(), threading.Thread(), 0, time.monotonic()
        if settings.machine == 0:
            self._listen()

    def close(self) -> None:
        self._leave()
        if self.settings.machine == 0:
            self._lighthouse.shutdown()

    # The first machine

    def announce(self, place: rounds_pb2.JoinResponse, learner: Learner, text: str) -> None:
        """Say what is trained here; :param text: digest of the training text. Raises ConfigError."""
        if learner.config.rounds.by_features:
            raise ConfigError('features are of the text of one machine: a site needs context_by = "copies"')
        known = rounds_pb2.JoinResponse.FromString(place.SerializeToString())
        known.lease = ""  # which is this machine's alone
        self._place = f"{place.run} {place.part} {place.replica}"
        self._store.set(TEXT, text)
        self._store.set(PLACE, MessageToJson(known))

    def begin(self, learner: Learner, steps: range) -> None:
        """Lend this state to all that are there, for some steps. Raises Interrupted."""
        if not self._state:
            self._wait_for([f"here/{machine}" for machine in range(1, self.settings.machines)], GATHER_S)
        self._state, lent = uuid.uuid4().hex, False
        while not lent:
            present = self._meet(steps=(steps.start, steps.stop))
            with self._exchange():
                lent = len(present) == 1 or bool(self._lend(_packed(learner)))

    def end(self) -> None:
        """Let the others know that the run is over."""
        present = self._meet(over=True)
        self._wait_for([f"bye/{each.machine}" for each in present if each.machine], FAREWELL_S)

    def _listen(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]
        from torchft.coordination import LighthouseServer

        try:
            family, *_, (own, *_) = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            self._own, listener = self._checked(str(own)), socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._own, self.port))
            listener.listen()
        except OSError as error:
            raise ServiceError(
                f"cannot listen on {self.address} ({error.strerror}): --site must be a free port of the first machine"
            ) from None
        # given a socket, it listens on that address alone
        self._store = TCPStore(
            self._own, self.port, None, True, EXCHANGE, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        shown = f"[{self._own}]" if ":" in self._own else self._own
        stuck_ms, silent_ms = int(STUCK_S * 1000), int(SILENT_S * 1000)
        self._lighthouse = LighthouseServer(f"{shown}:0", 1, join_timeout_ms=stuck_ms, heartbeat_timeout_ms=silent_ms)
        self._store.set(LIGHTHOUSE, f"http://{shown}:{self._lighthouse.address().rpartition(':')[2]}")
        self._arrive()

    # The others

    def follow(self, corpus: Corpus) -> int:
        """Work with the first machine to the end of the run; returns how many steps were made. Raises OnesweepError."""
        lost_s: float | None = None
        while True:
            try:
                learner, met, lost_s = self._settle_in(corpus), False, None
                while not (self._first if met else self._meet()[0]).over:
                    met = self._follow_round(learner)
                with self._reaching():
                    self._store.set(f"bye/{self.settings.machine}", "")
                return self._made
            except _AwayError as error:
                self._leave()
                if lost_s is None:
                    log.warning("%s; looking for it", error)
                    lost_s = time.monotonic()
                if time.monotonic() - lost_s >= self.patience_s:
                    words = f"gave up after {self.patience_s:.0f} s: is that machine 0's --site, and is it running?"
                    raise ServiceError(f"{error}; {words}") from None
                time.sleep(AGAIN_S)

    def _settle_in(self, corpus: Corpus) -> Learner:
        """Make here what the first machine trains. Raises InputError for other text, settings or versions than its."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._stop_if_asked()
        with self._reaching():
            with socket.create_connection((self.host, self.port), CONNECT.seconds) as link:
                self._own = self._checked(link.getsockname()[0])
            self._store = TCPStore(self.host, self.port, None, False, CONNECT, wait_for_workers=False)
            while not self._store.check([PLACE, TEXT]):
                self._stop_if_asked()  # it waits for the coordinator
                time.sleep(LOOK_S)
            place, text = Parse(self._store.get(PLACE), rounds_pb2.JoinResponse()), self._store.get(TEXT).decode()
        with tempfile.TemporaryDirectory(prefix="onesweep-site-") as scratch:
            spec = spec_of(place, Path(scratch), corpus)
        try:
            spec.check_join(join_request(corpus, self.settings), own_data=corpus.digest() == text)
        except StatusError as refusal:
            raise InputError(f"this machine cannot join the site at {self.address}: {refusal}") from None
        learner = learner_of(spec, place, corpus, self.settings)
        self._place, self._state = f"{place.run} {place.part} {place.replica}", ""
        with self._reaching():
            self._arrive()
        log.info("machine %d of the site: %s, replica %d", self.settings.machine, learner.part.name, place.replica)
        return learner

    def _follow_round(self, learner: Learner) -> bool:
        """The steps of a round that begins; True where the next one began meanwhile."""
        blob, first = b"", self._first
        with self._exchange():
            blob = self._lend(b"")
        if blob:
            _unpack(learner, blob)
            self._state = first.state
            try:
                for step in range(*first.steps):
                    learner.train(step, 1, partial(self.share, step))
                    self._made += 1
            except _BehindError:
                learner.part.module.zero_grad()
                return self._first.step is None
        return False

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Around calls to the first machine. Raises _AwayError."""
        try:
            yield
        except (RuntimeError, OSError):
            raise _AwayError(f"no site answers at {self.address}") from None

    # All

    def _arrive(self) -> None:
        """Be heard by the Lighthouse from now on. Raises RuntimeError where it does not answer."""
        from torchft.coordination import LighthouseClient

        url = self._store.get(LIGHTHOUSE).decode()
        self._client, client = LighthouseClient(url, CONNECT), LighthouseClient(url, CONNECT)
        self._arrival, self._left = self._store.add("arrivals", 1), threading.Event()
        client.heartbeat(self._name)
        self._store.set(f"here/{self.settings.machine}", "")
        self._beats = threading.Thread(target=self._beat, args=(client, self._left), name="beats", daemon=True)
        self._beats.start()

    def _beat(self, client: Any, left: threading.Event) -> None:  # noqa: ANN401
        while not left.wait(BEAT_S):
            if time.monotonic() - self._moved_s < STUCK_S:
                with suppress(Exception):  # the next meeting says what is wrong
                    client.heartbeat(self._name)

    def _leave(self) -> None:
        """Be heard no more."""
        self._left.set()
        if self._beats.is_alive():
            self._beats.join()

    def _meet(self, step: int | None = None, steps: tuple[int, int] = (0, 0), over: bool = False) -> Sequence[Presence]:
        """Wait until all that live have come, and connect those that may share a step; the first machine's words first.

        :param step: whose gradient this machine brings; :param steps: of the round that begins, and :param over: the
        first machine's alone. Raises Interrupted, InputError, _AwayError, _BehindError.
        """
        self._group, twins, own = None, 0, self.settings.machine  # the old connections close, which the others notice
        while True:
            self._calls += 1
            words = Presence(own, self._arrival, self._place, self._calls, self._state, step, steps, over)
            present = sorted((Presence(**each.data) for each in self._quorum(words)), key=lambda each: each.machine)
            numbers, first = [each.machine for each in present], present[0]
            # one that was killed while it waited may be in one more quorum, but not in two
            twins = twins + 1 if numbers.count(own) > 1 else 0
            if twins > 1 and any(each.machine == own and each.arrival < self._arrival for each in present):
                raise InputError(f"another machine of this site has number {own}: give each its own --machine")
            if first.machine or len(set(numbers)) < len(numbers):
                time.sleep(AGAIN_S)
                continue
            self._first = first
            if first.over and step is None:
                return present
            if first.place != self._place:
                raise _AwayError(f"the site at {self.address} has another place of the run than before")
            alike = [each for each in present if each.shares_with(first)]
            machines = [each.machine for each in alike]
            if own in machines and not first.over and not self._connected(first.call, machines):
                continue
            if step is not None and (first.step is None or own not in machines):
                raise _BehindError
            if own in machines:
                return alike

    def _quorum(self, words: Presence) -> Any:  # noqa: ANN401 - torchft has no types
        """Everybody who lives, once all have asked. Raises Interrupted, _AwayError."""
        while True:
            self._stop_if_asked()
            self._moved_s = time.monotonic()
            # Nothing ends a call, and Python must not end while a thread is in one: so it is repeated. Where
            # an answer comes in between, nobody can connect to this machine, and all meet once more.
            with self._reaching(), suppress(TimeoutError):
                return self._client.quorum(self._name, LISTEN, data=asdict(words)).participants

    def _connected(self, meeting: int, machines: list[int]) -> bool:
        """True with connections among exactly these machines."""
        from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]

        before, self.size = self.size, len(machines)
        if self.size != before and self.settings.machine == 0:
            alone = ": this one continues alone" if self.size == 1 else ""
            log.warning("%d of the site's %d machines share the steps%s", self.size, self.settings.machines, alone)
        if self.size == 1:
            return True
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # by its address: by a hostname or an interface, Gloo may choose another one of this machine
        options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname=self._own)], CONNECT
        rank, store = machines.index(self.settings.machine), PrefixStore(str(meeting), self._store)
        with self._exchange():
            group = ProcessGroupGloo(store, rank, self.size, options)
            group.set_timeout(EXCHANGE)
            self._group = group
        return self._group is not None

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Around what fails where another machine is lost. The connections close then, so that it fails for all."""
        try:
            yield
        except RuntimeError as error:
            log.warning("an exchange with the site's other machines failed (%s)", str(error).partition(". ")[0])
            self._group = None

    def share(self, step: int, module: nn.Module) -> None:
        """Put the mean of `size` machines in place of this one's gradient. Raises Interrupted, and as `_meet` does."""
        own, self._moved_s = gradients_of(module), time.monotonic()
        while self.size > 1:
            with self._exchange():
                total = own.clone()
                for piece in total.split(PIECE):
                    self._group.allreduce([piece]).wait()
                take_mean(module, total, self.size)
            if self._group is not None:
                break
            self._meet(step)  # those that are left make the same step

    def _lend(self, blob: bytes) -> bytes:
        """The first machine's bytes, to all. Raises RuntimeError where one is lost."""
        size = torch.tensor([len(blob)])
        self._group.broadcast(size, 0).wait()
        raw = torch.frombuffer(bytearray(blob or int(size)), dtype=torch.uint8)
        for piece in raw.split(PIECE):
            self._group.broadcast(piece, 0).wait()
        return raw.numpy().tobytes()

    def _wait_for(self, keys: list[str], within_s: float) -> None:
        ends = time.monotonic() + within_s
        while keys and not self._store.check(keys) and time.monotonic() < ends:
            self._stop_if_asked()
            time.sleep(LOOK_S)

    def _checked(self, own: str) -> str:
        """This machine's address at the site. Raises InputError for a public one that was not allowed."""
        if ipaddress.ip_address(own).is_global and not self.insecure:
            raise InputError(
                f"{own} is a public address, and a site sends plain text and asks for no token: "
                "give one of the site's own network or, behind a firewall, accept it with --insecure"
            )
        return own

    def _stop_if_asked(self) -> None:
        if self.asked_to_stop():
            raise Interrupted("stopped as asked; run again to go on")


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def gradients_of(module: nn.Module) -> Tensor:
    """All gradients, one after the other, then for each parameter 1 where it has one: float32 on the CPU."""
    grads = [(parameter, parameter.grad) for parameter in _trained(module)]
    flat = [torch.zeros(p.numel()) if grad is None else grad.detach().float().cpu().reshape(-1) for p, grad in grads]
    return torch.cat([*flat, torch.tensor([float(grad is not None) for _, grad in grads])])


def take_mean(module: nn.Module, total: Tensor, machines: int) -> None:
    """Put means in place of the gradients; :param total: the sum of `gradients_of` of so many machines."""
    parameters, begin = _trained(module), 0
    for parameter, found in zip(parameters, total[-len(parameters) :].tolist(), strict=True):
        end = begin + parameter.numel()
        mean = (total[begin:end] / machines).view_as(parameter).to(parameter.device)
        parameter.grad, begin = mean if found else None, end


def _packed(learner: Learner) -> bytes:
    """Weights, the optimizer's state, and the copies of other parts."""
    groups = {MODULE: learner.weights(), OPTIMIZER: learner.optimizers.tensors()}
    groups |= {f"{COPY}{part}/": dict(copy.state_dict()) for part, copy in learner.part.copies.items()}
    named = ((group + name, tensor) for group, tensors in groups.items() for name, tensor in tensors.items())
    return save_tensors({name: tensor.cpu().clone() for name, tensor in named})


def _unpack(learner: Learner, blob: bytes) -> None:
    tensors = load_tensors(blob)
    learner.load(under(MODULE, tensors))
    learner.optimizers.restore(under(OPTIMIZER, tensors))
    for part, copy in learner.part.copies.items():
        copy.load_state_dict(under(f"{COPY}{part}/", tensors))
