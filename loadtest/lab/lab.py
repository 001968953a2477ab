"""A lab: a node `router` and some hosts, joined by a profile's links, while its process lives."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Self

from loadtest.lab.forwarder import send_order
from loadtest.lab.namespaces import TUN, LabError
from loadtest.lab.profile import Profile
from stages.errors import InputError
from stages.signals import start_ticks

RECORD = "wan.json"  # record of the lab of `wan up`, in a private directory of the user
STOP_S = 15.0
PACKAGES = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}


@dataclass(frozen=True)
class Node:
    """A node of a lab: its address, and the file of its network namespace."""

    address: str
    namespace: str


@dataclass(frozen=True)
class Lab:
    profile: Profile
    places: dict[str, Node]  # `router`, `host-1`, ..
    pid: int  # of the lab process
    ticks: int  # when it started

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """The inverse of `asdict`. Raises KeyError, TypeError, ValueError or OnesweepError for anything else."""
        places = {name: Node(**node) for name, node in record["places"].items()}
        return cls(Profile.from_record(record["profile"]), places, int(record["pid"]), int(record["ticks"]))

    @property
    def is_up(self) -> bool:
        return start_ticks(self.pid) == self.ticks

    def address(self, node: str) -> str:
        """IP address of a node. Raises InputError."""
        return self._place(node).address

    def command(self, node: str, argv: list[str], *, outlives_parent: bool = False) -> list[str]:
        """The command that runs `argv` inside a node and dies with its parent. Raises InputError."""
        inside = ["nsenter", f"--net={self._place(node).namespace}", "--"]
        return [*inside, *([] if outlives_parent else ["setpriv", "--pdeathsig", "KILL", "--"]), *argv]

    def cut(self, one: str, other: str, is_cut: bool = True) -> None:
        """Drop every packet between two nodes, or deliver them again. Raises InputError or LabError."""
        ends = (self.address(one), self.address(other))
        send_order(self.pid, [ends, ends[::-1]], is_cut)

    def _place(self, node: str) -> Node:
        if node not in self.places:
            raise InputError(f"no node {node!r} in the lab; its nodes are {', '.join(self.places)}")
        return self.places[node]


def lab_problem() -> str:
    """A sentence on why this machine cannot make a lab; empty if it can."""
    if sys.platform != "linux":
        return "a lab needs Linux: network namespaces are its nodes"
    if os.geteuid() != 0:
        return "a lab needs root: it creates network namespaces (sudo, or a container with --privileged)"
    for program, package in PACKAGES.items():
        if shutil.which(program) is None:
            return f"the program {program} is missing: install the package {package}"
    if not TUN.exists():
        return f"{TUN} is missing: run `modprobe tun`"
    trial = ["unshare", "--net", "ip", "tuntap", "add", "dev", "wan", "mode", "tun"]
    done = subprocess.run(trial, capture_output=True, text=True)
    if done.returncode:
        message = " ".join(done.stderr.split())
        return f"this user cannot create network namespaces ({message}): a lab needs CAP_SYS_ADMIN, CAP_NET_ADMIN"
    return ""


@contextlib.contextmanager
def temporary_lab(profile: Profile, hosts: int) -> Iterator[Lab]:
    """This process's own lab during a `with` block; it dies with the thread that made it.

    Raises LabError or ConfigError.
    """
    profile.check_hosts(hosts)
    if problem := lab_problem():
        raise LabError(problem)
    request = {"profile": asdict(profile), "hosts": hosts, "owner": os.getpid()}
    with tempfile.TemporaryFile() as log:
        child = Child([sys.executable, "-P", "-m", "loadtest.lab.process"], request, log, directory="/")
        try:
            line = next(child.lines(), "")
            record: dict[str, Any] = json.loads(line or '{"error": "the lab process ended before it was ready"}')
            if "error" in record:
                raise LabError(record["error"])
            child.stop()
            yield Lab.from_record(record)
        finally:
            child.process.terminate()
            child.end(STOP_S)  # if it has to be killed, its keeper kills the rest


def find_lab(directory: Path) -> Lab | None:
    """The lab of `wan up` whose record is in `directory`, if it is up. Raises LabError."""
    path = directory / RECORD
    try:
        lab = Lab.from_record(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError, AttributeError, InputError) as error:
        raise LabError(f"{path} is damaged ({error}): remove it") from None
    return lab if lab.is_up else None


# A process that talks to its parent in JSON messages, one per line, on standard input and output.


class Child:
    """The parent's end."""

    def __init__(
        self, command: list[str], first: object, words: IO[Any] | None = None, directory: str | None = None
    ) -> None:
        """:param first: its first message. :param words: file for its standard error; None for our own."""
        # in its own session: Ctrl-C is for the parent, which then ends it
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
            start_new_session=True,
            cwd=directory,
        )
        self.send(first)

    def send(self, message: object) -> None:
        """Send a message; ignored if the process has ended, since its output then tells more."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def lines(self) -> Iterator[str]:
        """Yield its messages until it closes its output."""
        assert self.process.stdout is not None
        return iter(self.process.stdout.readline, "")

    def stop(self) -> None:
        """Close its input, so that it ends once it is done."""
        stdin, self.process.stdin = self.process.stdin, None
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                stdin.close()

    def end(self, within_s: float) -> None:
        """Stop it, and kill it if it is not done in time."""
        self.stop()
        with contextlib.suppress(OSError, ValueError, subprocess.TimeoutExpired):
            self.process.communicate(timeout=within_s)
        self.process.kill()  # no effect if it has ended
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
