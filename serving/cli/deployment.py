"""A deployment on this machine: one process for each host and one for the router, from one topology."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

import psutil

from serving.cli.ports import port_free
from serving.client.client import Client, RequestRefused, RouterError
from serving.router.request import DEFAULT_ROUTER
from serving.router.topology import HostEntry, Topology, read_topology
from stages.errors import InputError, OnesweepError, ServiceError, TopologyError
from stages.progress import ProgressLine
from stages.signals import deferred
from stages.wire.channel import DRAIN_S, is_loopback, parse_address
from stages.wire.tls import tls_arguments
from stages.wire.tokens import token_for

T = TypeVar("T")

STOP_S = DRAIN_S + 5.0
POLL_S = 0.1
# How long processes may take to be ready, and how many bytes of weights they read, check and lay out in a second, on a
# machine that is busy; who dies is not waited for.
READY_S, LOADED_BYTES_S = 60.0, 5e6
LOG_LINES = 5
TOPOLOGY = "topology.toml"
# How a server is started: -P, because the directory that `up` is called in is not for importing from.
MODULE = ["-P", "-m", "serving.cli"]
HTTP = "http"  # what the gateway's process is called
ASKER = [
    "-P",
    "-c",
    "import sys; from serving.cli.deployment import print_answers; print_answers(sys.argv[1])",
]

# Turns the name and the command of a process into the command that runs it where it belongs.
Place = Callable[[str, list[str]], list[str]]


class NothingUp(OnesweepError):
    """No deployment is running."""


def state_directory() -> Path:
    """The directory of a detached deployment's record and logs: $ONESWEEP_STATE, or a folder of this user's."""
    named = os.environ.get("ONESWEEP_STATE")
    return Path(named) if named else Path(tempfile.gettempdir()) / f"onesweep-{os.getuid()}"


@dataclass
class Deployment:
    """Running processes, by name, and where their logs are."""

    topology: Topology
    directory: Path
    processes: dict[str, int]  # process id of each host and of `router`; a second one's by its address
    place: Place | None = None  # none: everything runs on this machine as it is, on loopback
    commands: dict[str, list[str]] = field(default_factory=dict, repr=False)  # how each process was started
    ready_within_s: float = field(default=READY_S, repr=False)

    @classmethod
    def start(
        cls,
        topology: Topology,
        checkpoint: Path,
        directory: Path,
        threads: int = 1,
        *,
        place: Place | None = None,
        host_options: Sequence[str] = (),
        router_options: Sequence[str] = (),
        metrics: str | None = None,
        http: str | None = None,
        hosts_run: bool = False,
        second: str | None = None,
    ) -> Deployment:
        """Start every process; they are live but not ready when this returns.

        :param place: puts each process elsewhere, such as into a network namespace, by its name; addresses need not be
            loopback then. What asks for the router's status is placed as `router`, too.
        :param host_options: more options of every `onesweep host`, such as ("--insecure",).
        :param router_options: more options of `onesweep router`.
        :param metrics: where the router's metrics are; each host's are on a port of its own after it.
        :param http: where a gateway listens, too.
        :param hosts_run: the hosts are up elsewhere: only the router and the gateway are started.
        :param second: where a second router listens, which deploys nothing.

        Raises OnesweepError when one is up already, or an address is taken.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ServiceError(f"cannot make {directory}: {error.strerror}; name another in ONESWEEP_STATE") from None
        check_none_up(directory)
        seen = _metrics_options(metrics, ["router", *(host.name for host in topology.hosts)])
        if place is None:
            check_free(topology, http, () if hosts_run else topology.hosts)
        # all of it is read by processes that share this machine
        weight_bytes = sum(path.stat().st_size for path in checkpoint.rglob("*.safetensors"))
        deployment = cls(topology, directory, {}, place, ready_within_s=READY_S + weight_bytes / LOADED_BYTES_S)
        topology_path = directory / TOPOLOGY
        topology_path.write_text(topology.to_toml(), encoding="utf-8")
        shelves = directory / "shelves"
        shutil.rmtree(shelves, ignore_errors=True)  # it begins with the checkpoint, whatever was deployed before
        try:
            for host in () if hosts_run else topology.hosts:
                arguments = _host_arguments(topology, host, checkpoint, threads)
                arguments += ["--shelf", str(shelves / host.name)]
                deployment._spawn(host.name, [*arguments, *host_options, *seen[host.name]])
            router = ["router", "--topology", str(topology_path), "--checkpoint", str(checkpoint)]
            router += ["--threads", str(threads), *router_options]
            deployment._spawn("router", [*router, "--shelf", str(shelves / "router"), *seen["router"]])
            if second is not None:
                deployment._spawn(second, [*router, "--listen", second])
            if http is not None:
                gateway = ["http", "--listen", http, "--router", topology.router]
                deployment._spawn(HTTP, [*gateway, *tls_arguments(topology.client_tls)])
        except BaseException:
            deployment.stop()
            raise
        return deployment

    def wait_ready(self, waiting: Callable[[str], object] = lambda reason: None) -> None:
        """Return when the router can serve. Raises ServiceError with the reason and the log of what died.

        :param waiting: called now and then with the reason why it cannot yet.
        """
        deadline, reason = time.monotonic() + self.ready_within_s, "the router does not answer yet"
        answers = answers_of(self.topology) if self.place is None else self._answers_there(self.place)
        with contextlib.closing(answers):
            for answer in answers:
                self.check_alive()
                if answer == "":
                    return
                reason = answer or reason
                waiting(reason)
                if time.monotonic() > deadline:
                    break
        raise ServiceError(f"not ready after {self.ready_within_s:.0f} s: {reason}; logs are in {self.directory}")

    def wait_listening(self, address: str, timeout_s: float = READY_S) -> None:
        """Return when somebody listens at `address`. Raises ServiceError as `wait_ready` does."""
        deadline = time.monotonic() + timeout_s
        while port_free(*parse_address(address)):
            self.check_alive()
            if time.monotonic() > deadline:
                raise ServiceError(f"nobody listens at {address} after {timeout_s:.0f} s; logs are in {self.directory}")
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raises ServiceError with the last log lines of a process that ended."""
        for name, words in self.ended().items():
            raise ServiceError(f"{name} ended: {words}")

    def ended(self) -> dict[str, str]:
        """The last log lines of each process that ended, by its name."""
        return {name: self._last_words(name) for name in self.processes if self._process(name) is None}

    def revive(self, name: str) -> None:
        """Start a process that ended again, as it was started."""
        self._launch(name, self.commands[name], "ab")

    def kill(self, name: str) -> None:
        """End a process at once, as a power cut would; returns when it has ended."""
        process = self._process(name)
        if process is not None:
            process.kill()
            psutil.wait_procs([process], timeout=STOP_S)

    def stop(self) -> None:
        """End every process, the router first so that running requests end; kill what does not stop."""
        hosts = {host.name for host in self.topology.hosts}
        _end([self._process(name) for name in self.processes.keys() - hosts])
        _end([self._process(name) for name in hosts])
        self._record_path(self.directory).unlink(missing_ok=True)

    def _answers_there(self, place: Place) -> Generator[str | None, None, None]:
        """Like `answers_of`, for a router that this process cannot reach: asked by a process beside it."""
        command = place("router", [sys.executable, *ASKER, str(self.directory / TOPOLOGY)])
        with subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as asker:
            try:
                assert asker.stdout is not None
                for line in asker.stdout:
                    yield json.loads(line)
            finally:
                asker.kill()

    def _spawn(self, name: str, arguments: list[str]) -> None:
        command = [sys.executable, *MODULE, *arguments]
        self.commands[name] = self.place(name, command) if self.place else command
        self._launch(name, self.commands[name], "wb")

    def _launch(self, name: str, command: list[str], log_mode: str) -> None:
        # An interrupt between a process' start and its record would leave it running.
        with deferred(), (self.directory / f"{name}.log").open(log_mode) as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            self.processes[name] = process.pid
        self._record_path(self.directory).write_text(json.dumps({"processes": self.processes}), encoding="utf-8")

    def _process(self, name: str) -> psutil.Process | None:
        """The process called `name`, if it still runs; another that was given its number since is not ours."""
        with contextlib.suppress(KeyError, psutil.Error):
            process = psutil.Process(self.processes[name])
            command = process.cmdline()
            # none in the moment of its start, and none for one that ended and was not waited for
            starting = not command and process.status() != psutil.STATUS_ZOMBIE
            if starting or (_holds(command, MODULE) and name in command):
                return process
        return None

    def _last_words(self, name: str) -> str:
        lines = (self.directory / f"{name}.log").read_text(errors="replace").strip().splitlines()
        if lines and (said := re.match(r"onesweep( \w+)*: (error: )?", lines[-1])):
            return lines[-1][said.end() :]
        return " ".join(lines[-LOG_LINES:]) or "its log is empty"

    @staticmethod
    def _record_path(directory: Path) -> Path:
        return directory / "deployment.json"


def answers_of(topology: Topology) -> Generator[str | None, None, None]:
    """Again and again: why the router cannot serve, empty when it can, None when it does not answer."""
    tls = topology.client_tls
    with Client(topology.router, tls=tls, token=token_for(topology.router, tls), insecure=True) as client:
        while True:
            try:
                status = client.status(timeout_s=2.0)
                reasons = "; ".join(host.reason for host in status.hosts if host.reason)
                yield "" if status.ready else reasons or "not ready"
            except RequestRefused:  # it wants a token that is not in the environment
                yield "" if client.serves(timeout_s=2.0) else "not ready"
            except RouterError:
                yield None
            time.sleep(POLL_S)


def print_answers(topology: str) -> None:
    """Print `answers_of` a file, a line of JSON for each, until nobody reads them or the router is ready."""
    try:
        hosts = read_topology(Path(topology))
    except TopologyError:  # the deployment was read from it, so it was removed since: nobody waits any more
        return
    for answer in answers_of(hosts):
        print(json.dumps(answer), flush=True)
        if answer == "":
            return


def find_deployment(directory: Path) -> Deployment | None:
    """The deployment that runs from `directory`, if any; a record of dead processes is removed.

    Raises ServiceError when somebody else could have written the record.
    """
    check_private(directory)
    record_path = Deployment._record_path(directory)
    try:
        record = json.loads(record_path.read_text(encoding="utf-8"))
        processes = {str(name): int(pid) for name, pid in record["processes"].items()}
        topology = read_topology(directory / TOPOLOGY)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OnesweepError):
        return None
    deployment = Deployment(topology, directory, processes)
    if any(deployment._process(name) for name in processes):
        return deployment
    record_path.unlink(missing_ok=True)
    return None


def check_none_up(directory: Path) -> None:
    """Raise ServiceError where a deployment runs from `directory`."""
    if (previous := find_deployment(directory)) is not None:
        raise ServiceError(f"a deployment is up already (router {previous.topology.router}); `onesweep down` first")


def router_here(given: str | None) -> tuple[str, Topology | None]:
    """`given`, else the router that is up here with its topology, else where one is by default."""
    deployment = None if given else find_deployment(state_directory())
    topology = deployment.topology if deployment else None
    return given or (topology.router if topology else DEFAULT_ROUTER), topology


def require_deployment(directory: Path) -> Deployment:
    """Like `find_deployment`. Raises NothingUp."""
    deployment = find_deployment(directory)
    if deployment is None:
        raise NothingUp("nothing is up; start a deployment with `onesweep up --detach`")
    return deployment


@contextlib.contextmanager
def temporary_deployment(
    topology: Topology,
    checkpoint: Path,
    threads: int = 1,
    waiting: Callable[[str], object] = lambda reason: None,
    **options: Any,  # noqa: ANN401 - those of `Deployment.start`
) -> Iterator[Deployment]:
    """A deployment for the length of a `with` block, in a directory of its own; see `Deployment.start`.

    :param waiting: as of `wait_ready`.
    """
    directory = Path(tempfile.mkdtemp(prefix="onesweep-"))
    try:
        deployment = Deployment.start(topology, checkpoint, directory, threads, **options)
        try:
            deployment.wait_ready(waiting)
            yield deployment
        finally:
            deployment.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def present(
    deployment: Deployment, http: str | None, progress: ProgressLine | None = None, note: str = "", watched: bool = True
) -> None:
    """Print where everything is, once it is ready, and watch it; stop it where that fails. Raises OnesweepError."""
    try:
        deployment.wait_ready(progress.at if progress else lambda reason: None)
        if http:
            deployment.wait_listening(http)
        if progress:
            progress.close()
        lines = [f"{host.name:10} {host.address:22} blocks {host.span}" for host in deployment.topology.hosts]
        lines.append(f"{'router':10} {deployment.topology.router:22} ready; logs in {deployment.directory}")
        print("\n".join([*lines, *[f"{'http':10} http://{http}"] * bool(http), *[note] * bool(note)]), flush=True)
        if watched:
            watch(deployment)
    except BaseException:
        deployment.stop()
        raise


def watch(deployment: Deployment) -> None:
    """Return at Ctrl-C, with everything stopped. A host that ends by itself is started again if others hold its blocks
    meanwhile; for any other process, raises ServiceError."""
    replicated = deployment.topology.replicated
    with contextlib.suppress(KeyboardInterrupt):
        print("Ctrl-C stops them.", flush=True)
        while True:
            time.sleep(1)
            for name in set(deployment.ended()) & replicated:
                print(f"{name} ended and is started again; see its log", flush=True)
                deployment.revive(name)
            deployment.check_alive()
    deployment.stop()


def _host_arguments(topology: Topology, host: HostEntry, checkpoint: Path, threads: int) -> list[str]:
    from stages.checkpoint.manifest import has_experts  # torch, which other commands need not wait for

    successors = topology.successors(host, has_experts(checkpoint))
    return [
        *("host", host.name, "--checkpoint", str(checkpoint), "--blocks", host.span),
        *("--listen", host.listen, "--threads", str(threads)),
        *(("--next", ",".join(successors)) if successors else ()),
        *(("--device", host.device) if host.device else ()),
        *tls_arguments(topology.tls_of(host.name)),
    ]


def _metrics_options(address: str | None, names: Sequence[str]) -> dict[str, list[str]]:
    """The flag of each process, on neighbouring ports. Raises InputError."""
    if address is None:
        return {name: [] for name in names}
    where, port = parse_address(address, "--metrics")
    if not 0 < port <= 65536 - len(names):
        raise InputError(f"--metrics {address}: {len(names)} processes need as many ports from {port} on")
    shown = f"[{where}]" if ":" in where else where
    return {name: ["--metrics", f"{shown}:{port + i}"] for i, name in enumerate(names)}


def _holds(command: list[str], part: list[str]) -> bool:
    """True if `part` is somewhere in `command`: the words that place a process may precede it."""
    return any(command[i : i + len(part)] == part for i in range(len(command) - len(part) + 1))


def check_free(topology: Topology, http: str | None, hosts: Sequence[HostEntry]) -> None:
    """Raise ServiceError where the router, the gateway or one of `hosts` could not listen on this machine."""
    listeners = {"router": topology.router} | {host.name: host.listen for host in hosts}
    for name, address in (listeners | ({HTTP: http} if http else {})).items():
        if not is_loopback(address):
            raise ServiceError(
                f"{name} listens on {address}, which is not loopback: `up` starts processes of this machine only; "
                "start that one there with `onesweep host`, `onesweep router` or `onesweep http`"
            )
        if not port_free(*parse_address(address)):
            raise ServiceError(
                f"{address}, where {name} should listen, is in use: `onesweep down` ends a deployment of ours, "
                "another topology or --port avoids it"
            )


def check_private(directory: Path) -> None:
    """Raise ServiceError unless `directory` is this user's alone: what it says is believed, and signals are sent."""
    try:
        status = directory.lstat()
    except OSError:
        return
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ServiceError(
            f"{directory} must be a directory of yours that nobody else can enter (chmod 700): "
            "put that right, or name another in ONESWEEP_STATE"
        )


def _end(processes: list[psutil.Process | None]) -> None:
    running = [process for process in processes if process is not None]
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, stubborn = psutil.wait_procs(running, timeout=STOP_S)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(stubborn, timeout=STOP_S)


# Where the weights are that come with the repository.

# Beside the packages in a checkout, within one of them in a wheel.
_HOME = Path(str(files("onesweep")))
SHIPPED = _HOME / "weights" if (_HOME / "weights" / "chain").is_dir() else _HOME.parent / "weights"
