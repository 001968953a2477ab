"""A deployment on this machine: one process for each host and one for the router, with its arguments."""

from __future__ import annotations

import contextlib
import glob
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from serving.cli.ports import check_free, port_free
from serving.cli.servers import (
    FORKED,
    HTTP,
    MODULE,
    RECORD,
    RELEASES,
    ROUTER,
    TOPOLOGY,
    fork_servers,
    record_processes,
    recorded,
    server_arguments,
)
from serving.client.client import Client, RequestRefused, RouterError
from serving.client.failover import HandshakeError
from serving.client.result import HostsLost, unready_words
from serving.router.topology import Topology, read_topology
from stages.errors import InputError, OnesweepError, ServiceError
from stages.memory import with_large_pages
from stages.progress import ProgressLine, ticking
from stages.signals import LIFELINE_VARIABLE, STOP_REQUESTED, deferred, on_signal
from stages.wire.channel import DRAIN_S, parse_address
from stages.wire.secret_files import file_lock, make_state_directory, state_directory
from stages.wire.tokens import own_token_paths

STOP_S = DRAIN_S + 5.0
POLL_S = 0.1
# How long processes may take to be ready, and how many bytes of weights they read, check and lay out in a second, on a
# busy machine. A process that dies ends the wait.
READY_S, LOADED_BYTES_S, MIN_RUN_S = 60.0, 5e6, 5.0  # MIN_RUN_S: a router that ends sooner than this would end again
LOG_LINES = 5
NO_TOKEN = "not ready; only callers with a token see why"
SILENT = "it does not answer"
NO_HOLDER = "are on no machine: invite one with"  # ends advice about blocks: waiting does not help there
# Turns a process's name and command into the command that runs it in its place.
Place = Callable[[str, list[str]], list[str]]


class NoDeployment(OnesweepError):
    """No deployment is running."""


@dataclass
class Deployment:
    """Running processes by name, and the directory of their logs."""

    topology: Topology
    directory: Path
    processes: dict[str, int]  # process ids of the hosts and of `router`; a second router's under its address
    commands: dict[str, list[str]] = field(default_factory=dict, repr=False)  # the command of each process
    ready_within_s: float = field(default=READY_S, repr=False)
    lifelines: list[Any] | None = field(default=None, repr=False)  # pipes whose readers end with this process

    @classmethod
    def start(
        cls,
        topology: Topology,
        checkpoint: Path,
        directory: Path,
        *,
        place: Place | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Deployment:
        """Start every process; when this returns, they run but are not ready.

        :param place: puts a process elsewhere by its name, such as into a network namespace; addresses then need not be
            loopback.
        :param options: as of `server_arguments`.

        Raises OnesweepError when an address is taken.
        """
        if place is None:
            hosts = () if options.get("hosts_run") else topology.hosts
            http = {HTTP: options["http"]} if options.get("http") else {}
            check_free({ROUTER: topology.router, **{host.name: host.listen for host in hosts}, **http})
        make_state_directory(directory)
        # after the checks: this replaces the tokens of earlier servers at these addresses
        servers = server_arguments(topology, checkpoint, directory, **options)
        # the processes share this machine and read all of it
        weight_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors"))
        lifelines = list[Any]() if options.get("hosts_run") else None
        deployment = cls(topology, directory, {}, {}, READY_S + weight_bytes / LOADED_BYTES_S, lifelines)
        (directory / TOPOLOGY).write_text(topology.to_toml(), encoding="utf-8")
        shutil.rmtree(directory / RELEASES, ignore_errors=True)  # releases deployed earlier are not served again
        try:
            for name, arguments in servers.items():
                command = [sys.executable, *MODULE, *arguments]
                deployment.commands[name] = place(name, command) if place else command
            with ticking("starting hosts and a router" if lifelines is None else "starting a router"):
                if place is None and lifelines is None and sys.platform == "linux":
                    deployment.processes |= fork_servers(directory, servers)
                else:
                    for name in servers:
                        deployment._launch(name, "wb")
        except BaseException:
            with contextlib.suppress(OSError, ValueError):
                deployment.processes |= recorded(directory)
            deployment.stop_visibly()
            raise
        return deployment

    def wait_ready(
        self, waiting: Callable[[str], object] = lambda reason: None, answers: Iterator[str | None] | None = None
    ) -> None:
        """Return when the router can serve. Raises ServiceError with the reason, and the log of a process that died.

        :param waiting: called now and then with the reason for the wait.
        :param answers: as `answers_of`, for a router that this process cannot reach.
        """
        deadline, reason = time.monotonic() + self.ready_within_s, "the router does not answer yet"
        with Client(self.topology.router, tls=self.topology.client_tls, insecure=True) as client:
            for answer in answers or answers_of(client):
                self.check_alive()
                if answer == "":
                    return
                if answer:
                    reason = answer
                    # the processes run, so a host that does not answer is about to
                    waiting("the hosts start" if isinstance(answer, HostsLost) else answer)
                if time.monotonic() > deadline:
                    break
        raise ServiceError(f"not ready after {self.ready_within_s:.0f} s: {reason}; logs are in {self.directory}")

    def check_alive(self) -> None:
        """Raises ServiceError with the last log lines of a process that ended."""
        for name, words in self.ended().items():
            raise ServiceError(f"{name} exited: {words}")

    def ended(self) -> dict[str, str]:
        """The last log lines of each process that ended, by its name."""
        return {name: self._last_words(name) for name in self.processes if self._process(name) is None}

    def revive(self, name: str) -> None:
        """Restart a process that ended, with its original command."""
        self._launch(name, "ab")

    def kill(self, name: str) -> None:
        """End a process at once, as a power cut would; returns when it has ended."""
        if (process := self._process(name)) is not None:
            process.kill()
            psutil.wait_procs([process], timeout=STOP_S)

    def stop(self) -> None:
        """End every process, the router first: running requests end. Kill those that do not stop; at a signal, all."""
        hosts = {host.name for host in self.topology.hosts}
        routers = [self.topology.router, *(self.processes.keys() - hosts - {ROUTER, HTTP})]
        with on_signal(lambda number: [*map(self.kill, self.processes)]):
            _end([self._process(name) for name in self.processes.keys() - hosts])
            _end([self._process(name) for name in hosts])
        addresses = (*routers, *(each for host in self.topology.hosts for each in (host.address, host.listen)))
        for path in (*own_token_paths(*addresses), self.directory / RECORD):
            with contextlib.suppress(OSError):  # on a read-only disk they stay, and say nothing without the processes
                path.unlink(missing_ok=True)

    def stop_visibly(self) -> None:
        """`stop` one process after the other for a person who waits: a second signal would kill them all at once."""
        with contextlib.suppress(OSError):  # the reader has gone, as with `2>&1 | head`
            ProgressLine().say("stopping the servers: the router finishes its requests first; Ctrl-C kills them")
        with file_lock(self.directory / RECORD):
            self.stop()

    def _launch(self, name: str, log_mode: str) -> None:
        # An interrupt between a process's start and its record would leave the process running.
        with deferred(), (self.directory / f"{name}.log").open(log_mode) as log:
            process = subprocess.Popen(
                self.commands[name],
                stdin=subprocess.DEVNULL if self.lifelines is None else subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=with_large_pages() | {LIFELINE_VARIABLE: "" if self.lifelines is None else "stdin"},
            )
            if self.lifelines is not None:
                self.lifelines.append(process.stdin)
            self.processes[name] = process.pid
            record_processes(self.directory, self.processes)

    def _process(self, name: str) -> psutil.Process | None:
        """The process called `name`, if it still runs; not a later process with the same id."""
        with contextlib.suppress(KeyError, psutil.Error):
            process = psutil.Process(self.processes[name])
            command = process.cmdline()
            # empty at the moment of its start, and for a process that ended without a wait for it
            starting = not command and process.exe() != "" and _runs(process)  # a thread of the kernel has no file
            # words that place a process may precede them
            is_ours = any(command[i : i + len(MODULE)] in (MODULE, FORKED) for i in range(len(command)))
            if starting or (is_ours and name in command):
                return process
        return None

    def _last_words(self, name: str) -> str:
        lines = (self.directory / f"{name}.log").read_text(errors="replace").strip().splitlines()
        if asked := [line for line in lines[-LOG_LINES:] if STOP_REQUESTED in line]:
            return asked[-1][asked[-1].index(STOP_REQUESTED) :]
        if lines and (prefix := re.match(r"onesweep( \w+)*: (error: )?", lines[-1])):
            return lines[-1][prefix.end() :]
        is_silent = not lines or re.search(r"^[-\d]+ [:,\d]+ (INFO|WARNING) |: ready$", lines[-1])
        return "without a message: killed, perhaps out of memory" if is_silent else " ".join(lines[-LOG_LINES:])


def answers_of(client: Client, within_s: float = 2.0) -> Iterator[str | None]:
    """Yield, again and again, why the router cannot serve: empty when it can, None without an answer.

    Raises HandshakeError, which no wait mends."""
    while True:
        try:
            status = client.status(within_s)
            unheld = [line for line in status.advice if NO_HOLDER in line]
            yield "" if status.ready else "; ".join(unheld) or unready_words(status) or "not ready"
        except RequestRefused:
            yield "" if client.serves(within_s) else NO_TOKEN
        except HandshakeError:
            raise
        except RouterError as error:
            yield SILENT if error.code.name == "DEADLINE_EXCEEDED" else None
        time.sleep(POLL_S)


def find_deployment(directory: Path) -> Deployment | None:
    """The deployment that runs from `directory`, if any; removes the remains of dead ones."""
    try:
        processes, topology = recorded(directory), read_topology(directory / TOPOLOGY)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OnesweepError):
        return None
    deployment = Deployment(topology, directory, processes)
    if any(deployment._process(name) for name in processes):
        return deployment
    deployment.stop()
    return None


def running_deployments() -> list[Deployment]:
    """This user's deployments on this machine. Raises OnesweepError as `state_directory` does."""
    # for another user's directory this finds none, where `Path.glob` raises
    records = sorted(glob.glob(f"*/{RECORD}", root_dir=state_directory()))
    found = (find_deployment((state_directory() / record).parent) for record in records)
    return [deployment for deployment in found if deployment]


def deployment_here(router: str | None = None) -> Deployment | None:
    """The deployment of a router, else the only one, if any. Raises OnesweepError if several run."""
    running = running_deployments()
    if router is not None:
        there = [path.with_suffix("") for path in own_token_paths(router)]
        return next((each for each in running if each.directory in there), None)
    if len(running) > 1:
        names = ", ".join(f"{each.topology.router} ({each.directory / TOPOLOGY})" for each in running)
        raise InputError(f"several routers are up: name one with --router (for doctor: --topology): {names}")
    return running[0] if running else None


def new_directory(topology: Topology) -> Path:
    """The directory of a new deployment. Raises ServiceError if a running one shares its router or a host."""
    make_state_directory(state_directory())
    for other in running_deployments():
        if topology.addresses & other.topology.addresses:
            raise ServiceError(
                f"a deployment is already up (router {other.topology.router}, in {other.directory}): `onesweep down` "
                "stops it; for a second one give another --port, or a topology with other addresses"
            )
    return own_token_paths(topology.router)[0].with_suffix("")


@contextlib.contextmanager
def temporary_deployment(
    topology: Topology,
    checkpoint: Path,
    waiting: Callable[[str], object] = lambda reason: None,
    answers: Iterator[str | None] | None = None,
    **options: Any,  # noqa: ANN401 - those of `Deployment.start`
) -> Iterator[Deployment]:
    """A deployment during a `with` block, in its own directory; see its `start` and `wait_ready`."""
    with tempfile.TemporaryDirectory(prefix="onesweep-", ignore_cleanup_errors=True) as directory:
        deployment = Deployment.start(topology, checkpoint, Path(directory), **options)
        try:
            deployment.wait_ready(waiting, answers)
            yield deployment
        except BaseException:
            deployment.stop_visibly()
            raise
        deployment.stop()


def present(
    deployment: Deployment,
    http: str | None,
    progress: ProgressLine,
    note: str = "",
    supervise: Callable[[Deployment], object] | None = None,
) -> None:
    """Print where everything is once it is ready, and watch it; stop it if that fails. Raises OnesweepError.

    :param supervise: called each second; None: do not watch it."""
    try:
        deployment.wait_ready(progress.at)
        deadline = time.monotonic() + READY_S
        while http and port_free(*parse_address(http)):
            deployment.check_alive()
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"nothing listens at {http} after {READY_S:.0f} s; logs are in {deployment.directory}"
                )
            time.sleep(POLL_S)
        progress.close()
        lines = [f"{host.name:10} {host.address:22} blocks {host.span}" for host in deployment.topology.hosts]
        lines.append(f"{'router':10} {deployment.topology.router:22} ready; logs in {deployment.directory}")
        print("\n".join([*lines, *[f"{'http':10} http://{http}"] * bool(http), *[note] * bool(note)]), flush=True)
        if supervise:
            watch(deployment, supervise)
    except BaseException:
        deployment.stop_visibly()
        raise


def watch(deployment: Deployment, supervise: Callable[[Deployment], object]) -> None:
    """Return at Ctrl-C, with everything stopped. Restarts a host that ends by itself if others hold its blocks, and the
    router and gateway of joined machines if they ran for MIN_RUN_S; otherwise raises ServiceError."""
    replicated = deployment.topology.replicated
    since = {} if deployment.lifelines is None else dict.fromkeys((ROUTER, HTTP), time.monotonic())
    with contextlib.suppress(KeyboardInterrupt):
        print("Ctrl-C stops them.", flush=True)
        while True:
            time.sleep(1)
            for name in deployment.ended():
                if name in replicated or time.monotonic() - since.get(name, time.monotonic()) > MIN_RUN_S:
                    print(f"{name} exited and is being restarted; see its log", flush=True)
                    deployment.revive(name)
                    since[name] = time.monotonic()
            deployment.check_alive()
            supervise(deployment)
    deployment.stop_visibly()


def _end(processes: list[psutil.Process | None]) -> None:
    running = [process for process in processes if process is not None]
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
        deadline = time.monotonic() + STOP_S
        while (running := [each for each in running if _runs(each)]) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _runs(process: psutil.Process) -> bool:
    """False for a process that ended, even before its parent has waited for it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False
