"""A site: machines that act as one worker. Each computes the gradient of its own text, and all step by the mean."""

# Machine 0 is the worker that the coordinator knows. Before steps it forms a group of all ready machines through its
# own TCPStore and lends them its weights and optimizer; Gloo adds the gradients. If an exchange fails, it forms a group
# of the remaining machines for the same step. torchrun's elastic agent would not do: it unpickles its store's contents,
# so anyone who reaches the port can run code, and a machine that fails for good ends the others.

import ipaddress
import json
import logging
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from google.protobuf.json_format import MessageToJson, Parse
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from stages.errors import ConfigError, InputError, Interrupted, ServiceError, file_errors
from stages.wire.channel import parse_address
from stages.wire.status import StatusError
from trainer.blocks.data import Corpus
from trainer.rounds.codecs import with_prefix
from trainer.rounds.parts import Learner
from trainer.rounds.settings import WorkerSettings
from trainer.rounds.spec import RunSpec
from trainer.rounds.worker import join_request
from trainer.v1 import rounds_pb2

log = logging.getLogger(__name__)

CONNECT, EXCHANGE = timedelta(seconds=15), timedelta(seconds=60)  # EXCHANGE: a step's wait for a slow machine
GATHER_S = 120.0  # how long machine 0 waits for all machines before its first step
RETURN_S = 10.0  # later wait for the machines of the last step, or for them to learn that the run is over
RETRY_S, POLL_S = 0.2, 0.05
PIECE = 2**24  # numbers per exchange
PLACE, OVER = "place", "over"  # keys of the store; also for each machine:
READY, BYE = "ready/", "bye/"  # its name for the next group, or nothing; and whether it knows that the run is over
MODULE, OPTIMIZER, COPY = "module/", "optimizer/", "copy/"  # groups of tensors in a state


class _UnreachableError(ServiceError):
    """Machine 0 does not answer, or holds another place of the run than before."""


class _ExchangeError(Exception):
    """A machine of the group is lost."""


class Site:
    """This machine at its site."""

    def __init__(
        self, settings: WorkerSettings, insecure: bool, patience_s: float, asked_to_stop: Callable[[], bool]
    ) -> None:
        """:param insecure: whether the site may use public addresses; :param patience_s: how long to try to reach
        machine 0. Raises InputError, ServiceError.
        """
        if settings.machine >= settings.machines:
            raise InputError(
                f"--machine must be 0 to {settings.machines - 1} in a site of {settings.machines} machines, "
                f"not {settings.machine}: give the same --machines on all"
            )
        self.insecure, self.patience_s, self.asked_to_stop = insecure, patience_s, asked_to_stop
        self.settings, self.address = settings, str(settings.site)
        self.host, self.port = parse_address(self.address, "--site")
        self.size = settings.machines  # of the group
        self._group: Any = None  # a ProcessGroupGloo of its machines; None for a single one
        self._place, self._groups, self._others = "", 0, set(range(1, settings.machines))
        if settings.machine == 0:
            self._listen()

    # Machine 0

    def announce(self, place: rounds_pb2.JoinResponse, learner: Learner, text: str) -> None:
        """Announce what this site trains; :param text: digest of the training text. Raises ConfigError."""
        if learner.config.rounds.by_features:
            raise ConfigError('a site cannot use features, which need one text for all: set context_by = "copies"')
        known = rounds_pb2.JoinResponse.FromString(place.SerializeToString())
        known.lease = ""  # the lease belongs to this machine alone
        self._place = json.dumps([MessageToJson(known), text])
        self._store.set(PLACE, self._place)

    def begin(self, learner: Learner, steps: range) -> None:
        """Form a group of all ready machines for some steps, and lend them this state. Raises Interrupted."""
        self._learner, self._stop = learner, steps.stop
        while True:
            ready = self._gather(RETURN_S if self._groups else GATHER_S)
            self._groups, self._others, machines = self._groups + 1, set(ready), [0, *ready]
            if len(machines) != self.size:
                alone = ": this one continues alone" if not ready else ""
                log.warning(
                    "%d of the site's %d machines share the steps%s", len(machines), self.settings.machines, alone
                )
            order = [self._place, self._groups, machines, steps.start, steps.stop]
            for machine, name in ready.items():
                self._store.compare_set(f"{READY}{machine}", name, "")
                self._store.set(name, json.dumps(order))
            try:
                self._connect(self._groups, machines)
                self._broadcast(_packed(learner))
                return
            except _ExchangeError:
                continue

    def end(self) -> None:
        """Tell the others that the run is over."""
        self._store.set(OVER, "")
        ends, keys = time.monotonic() + RETURN_S, [f"{BYE}{machine}" for machine in self._others]
        while keys and not self._store.check(keys) and time.monotonic() < ends:
            time.sleep(POLL_S)

    def _listen(self) -> None:
        with file_errors(ServiceError, f"cannot listen on {self.address}", "--site must be a free port of machine 0"):
            family, *_, (own, *_) = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            self._own, listener = self._checked(str(own)), socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._own, self.port))
            listener.listen()
        # with a given socket, it listens on that address alone
        self._store = TCPStore(
            self._own, self.port, None, True, EXCHANGE, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        for machine in self._others:
            self._store.set(f"{READY}{machine}", "")

    def _gather(self, within_s: float) -> dict[int, str]:
        """Ready machines and their names, once all of the last group are ready or after a while."""
        ends = time.monotonic() + within_s
        while True:
            self._stop_if_asked()
            names = {machine: self._store.get(f"{READY}{machine}") for machine in range(1, self.settings.machines)}
            ready = {machine: name.decode() for machine, name in names.items() if name}
            if self._others <= ready.keys() or time.monotonic() >= ends:
                return ready
            time.sleep(POLL_S)

    # The others

    def follow(self, corpus: Corpus) -> int:
        """Work with machine 0 to the end of the run; returns the number of steps done. Raises OnesweepError."""
        lost_s, made = None, 0
        while True:
            try:
                learner, lost_s = self._build_learner(corpus), None
                while (order := self._next_order()) is not None:
                    made += self._run_order(learner, *order)
                return made
            except _UnreachableError as error:
                if lost_s is None:
                    log.warning("%s; retrying", error)
                    lost_s = time.monotonic()
                if time.monotonic() - lost_s >= self.patience_s:
                    words = f"gave up after {self.patience_s:.0f} s: is that machine 0's --site, and is it running?"
                    raise ServiceError(f"{error}; {words}") from None
                time.sleep(RETRY_S)

    def _build_learner(self, corpus: Corpus) -> Learner:
        """Build what machine 0 trains. Raises InputError if text, settings or versions differ from its own."""
        self._stop_if_asked()
        with self._calling():
            with socket.create_connection((self.host, self.port), CONNECT.seconds) as link:
                self._own = self._checked(link.getsockname()[0])
            self._store = TCPStore(self.host, self.port, None, False, CONNECT, wait_for_workers=False)
            while not self._store.check([PLACE]):
                self._stop_if_asked()  # it waits for the coordinator
                time.sleep(POLL_S)
            self._place = self._store.get(PLACE).decode()
        known, text = json.loads(self._place)
        place = Parse(known, rounds_pb2.JoinResponse())
        with tempfile.TemporaryDirectory(prefix="onesweep-site-") as scratch:
            spec = RunSpec.joined(place, Path(scratch), corpus)
        try:
            spec.check_join(join_request(corpus, self.settings), own_data=corpus.digest() == text)
        except StatusError as refusal:
            raise InputError(f"this machine cannot join the site at {self.address}: {refusal}") from None
        learner = spec.learner(place, corpus, self.settings)
        log.info("machine %d of the site: %s, replica %d", self.settings.machine, learner.part.name, place.replica)
        return learner

    def _next_order(self) -> list[Any] | None:
        """Report ready and wait for an order; None once the run is over. Raises InputError, _UnreachableError."""
        name, machine = uuid.uuid4().hex, self.settings.machine
        with self._calling():
            self._store.set(f"{READY}{machine}", name)
            while not self._store.check([name]):
                self._stop_if_asked()
                if self._store.get(f"{READY}{machine}").decode() not in ("", name):
                    raise InputError(f"another machine of this site has number {machine}: give each its own --machine")
                if self._store.check([OVER]):
                    self._store.set(f"{BYE}{machine}", "")
                    return None
                time.sleep(POLL_S)
            return json.loads(self._store.get(name))

    def _run_order(self, learner: Learner, place: str, group: int, machines: list[int], start: int, stop: int) -> int:
        """Do steps with a group until a machine is lost; returns how many. Raises _UnreachableError."""
        if place != self._place:
            raise _UnreachableError(f"the site at {self.address} now has another place in the run")
        step = start
        try:
            self._connect(group, machines)
            _unpack(learner, self._broadcast(b""))
            for step in range(start, stop):
                learner.train(step, 1, partial(self.share, step))
            return stop - start
        except _ExchangeError:
            learner.part.module.zero_grad()
            return step - start

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Wrap calls to machine 0. Raises _UnreachableError."""
        try:
            yield
        except (RuntimeError, OSError):
            raise _UnreachableError(f"no site answers at {self.address}") from None

    # All

    def share(self, step: int, module: nn.Module) -> None:
        """Replace this machine's gradient by the mean over `size` machines. Raises Interrupted, _ExchangeError."""
        own = gradients_of(module)
        while self._group is not None:
            try:
                total = own.clone()
                with self._exchange():
                    for piece in total.split(PIECE):
                        self._group.allreduce([piece]).wait()
                take_mean(module, total, self.size)
                return
            except _ExchangeError:
                if self.settings.machine:
                    raise
                self.begin(self._learner, range(step, self._stop))

    def _connect(self, group: int, machines: list[int]) -> None:
        self._group, self.size = None, len(machines)
        if self.size == 1:
            return
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # by address: given a hostname or an interface, Gloo may choose another address of this machine
        options._devices, options._timeout = [ProcessGroupGloo.create_device(hostname=self._own)], CONNECT
        rank, store = machines.index(self.settings.machine), PrefixStore(str(group), self._store)
        with self._exchange():
            self._group = ProcessGroupGloo(store, rank, self.size, options)
            self._group.set_timeout(EXCHANGE)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Wrap exchanges that fail when a machine is lost; then close the connections, so that they fail for all."""
        try:
            yield
        except RuntimeError as error:
            log.warning("an exchange with the site's other machines failed (%s)", str(error).partition(". ")[0])
            self._group = None
            raise _ExchangeError from None

    def _broadcast(self, blob: bytes) -> bytes:
        """Send machine 0's bytes to all."""
        if self._group is None:
            return blob
        with self._exchange():
            size = torch.tensor([len(blob)])
            self._group.broadcast(size, 0).wait()
            raw = torch.frombuffer(bytearray(blob or int(size)), dtype=torch.uint8)
            for piece in raw.split(PIECE):
                self._group.broadcast(piece, 0).wait()
        return raw.numpy().tobytes()

    def _checked(self, own: str) -> str:
        """This machine's address at the site. Raises InputError for a public one without permission."""
        if ipaddress.ip_address(own).is_global and not self.insecure:
            raise InputError(
                f"{own} is a public address, but a site sends plain text and checks no token: "
                "use an address in the site's own network or, behind a firewall, allow it with --insecure"
            )
        return own

    def _stop_if_asked(self) -> None:
        if self.asked_to_stop():
            raise Interrupted("stopped on request; run again to resume")


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def gradients_of(module: nn.Module) -> Tensor:
    """All gradients in a row, then a 1 for each parameter that has one: float32 on the CPU."""
    grads = [(parameter, parameter.grad) for parameter in _trained(module)]
    flat = [torch.zeros(p.numel()) if grad is None else grad.detach().float().cpu().reshape(-1) for p, grad in grads]
    return torch.cat([*flat, torch.tensor([float(grad is not None) for _, grad in grads])])


def take_mean(module: nn.Module, total: Tensor, machines: int) -> None:
    """Replace the gradients by means; :param total: the sum of `gradients_of` over `machines` machines."""
    parameters, begin = _trained(module), 0
    for parameter, found in zip(parameters, total[-len(parameters) :].tolist(), strict=True):
        end = begin + parameter.numel()
        mean = (total[begin:end] / machines).view_as(parameter).to(parameter.device)
        parameter.grad, begin = mean if found else None, end


def _packed(learner: Learner) -> bytes:
    """Pack the weights, the optimizer's state and the copies of other parts."""
    groups = {MODULE: learner.weights(), OPTIMIZER: learner.optimizers.tensors()}
    groups |= {f"{COPY}{part}/": dict(copy.state_dict()) for part, copy in learner.part.copies.items()}
    named = ((group + name, tensor) for group, tensors in groups.items() for name, tensor in tensors.items())
    return save_tensors({name: tensor.cpu().clone() for name, tensor in named})


def _unpack(learner: Learner, blob: bytes) -> None:
    tensors = load_tensors(blob)
    learner.load(with_prefix(MODULE, tensors))
    learner.optimizers.restore(with_prefix(OPTIMIZER, tensors))
    for part, copy in learner.part.copies.items():
        copy.load_state_dict(with_prefix(f"{COPY}{part}/", tensors))
