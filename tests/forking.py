"""Real processes without their second of `import torch`: forked from a template that has imported it.

`install()` replaces `subprocess.Popen` for commands that run `python -m` with one of MODULES. Each becomes its own
process, a child of the test process with its own descriptors, environment, session and signals, forked from the
template (this file, run as a program), which has loaded the modules and started no thread. What a lab or the load test
writes before a command (nsenter for a network namespace, setpriv for a death signal) the fork does itself. Every other
command runs as always.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLI = "onesweep.serving.cli"
MODULES = (
    CLI,
    "onesweep.loadtest.faults.clients",
    "onesweep.loadtest.faults.faulty_host",
    "onesweep.loadtest.faults.byzantine_worker",
    "onesweep.loadtest.workload.caller",
)
MORTAL = ["setpriv", "--pdeathsig", "KILL", "--"]
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1  # prctl(2)
ADOPTED_S = 10.0  # within which an orphan becomes a child of the test process
ROOM = "x" * 4000  # of the template's own command line, for those of its children
MAX_REQUEST = 1 << 17
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)

# Libraries read these when they are loaded: a command that changes one needs a new interpreter.
EARLY = ("OMP_", "MKL_", "ATEN_", "TORCH", "PYTHON", "GRPC_", "LD_", "ONEDNN_", "DNNL_")

_Popen = subprocess.Popen


# The template


def serve(requests: socket.socket) -> None:
    """Fork a process a request and answer with its number, until the test process closes its end."""
    import grpc.aio
    import torch

    import onesweep.serving.cli.__main__
    import onesweep.serving.cli.generate
    import onesweep.serving.cli.serve
    import onesweep.serving.router.server
    import onesweep.stages.host.server
    import onesweep.trainer.rounds.commands

    assert threading.active_count() == 1, "a fork would lose the other threads"
    _ = grpc.aio, torch, onesweep
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        data, descriptors, _flags, _address = socket.recv_fds(requests, MAX_REQUEST, 3)
        if not data:
            return
        number_read, number_write = os.pipe()
        # Forked twice: the orphan becomes a child of the test process, which waits for it as for any other.
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                requests.close()
                os.close(number_read)
                _become(json.loads(data), descriptors, number_write)
            os._exit(0)
        os.waitpid(between, 0)
        os.close(number_write)
        requests.send(os.read(number_read, 32) or b"0")
        for descriptor in (number_read, *descriptors):
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: list[int], number_write: int) -> None:
    """Run the command in this fork, and end with its exit code."""
    code = 70
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _show(request["command"])
        if request["session"]:
            os.setsid()
        os.write(number_write, str(os.getpid()).encode())
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        os.closerange(3, max(*descriptors, number_write) + 1)
        # The template's own streams know whether its files can be sought, and these may be others.
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        _place(request["namespace"], request["mortal"])
        sys.argv = [request["module"], *request["arguments"]]
        if request["module"] == CLI:
            from onesweep.serving.cli.__main__ import main

            code = main(request["arguments"])
        else:
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
            code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # as an interpreter ends: other threads first
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _place(namespace: str | None, mortal: int) -> None:
    """Enter a network namespace, and have the kernel kill this process when the process `mortal` ends; 0: do not."""
    libc = ctypes.CDLL(None, use_errno=True)
    if namespace is not None:
        descriptor = os.open(namespace, os.O_RDONLY)
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
        os.close(descriptor)
    if mortal:
        # Until the process between has gone, its end would be the one that the kernel signals.
        deadline = time.monotonic() + ADOPTED_S
        while os.getppid() != mortal and time.monotonic() < deadline:
            time.sleep(0.001)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != mortal:
            os._exit(1)


def _show(command: list[str]) -> None:
    """Write the command where the kernel reads this process' command line: `down` and tests look there."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    line = b"\0".join(part.encode() for part in command)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


# The test process


class Template:
    """The template of this test process, started when it is first needed."""

    def __init__(self) -> None:
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), ROOM]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = _Popen(command, pass_fds=[theirs.fileno()], env=environment, cwd=ROOT)
        theirs.close()
        self.one_at_a_time = threading.Lock()
        self._libc = ctypes.CDLL(None, use_errno=True)

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """The number of a new child of this process."""
        with self.one_at_a_time:
            # Only now: orphans of other commands shall be init's, as outside of tests.
            self._libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self.requests, [json.dumps(request).encode()], descriptors)
                number = int(self.requests.recv(32) or 0)
            finally:
                self._libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not number:
            raise OSError("the template process did not fork")
        return number


_template: Template | None = None
_starting = threading.Lock()


@dataclass(frozen=True)
class Command:
    """A command that the template can run: `[nsenter --net=FILE --] [setpriv ...] python [-P] -m MODULE ...`."""

    module: str
    arguments: list[str]
    namespace: str | None
    mortal: bool  # it ends with the test process

    @classmethod
    def parse(cls, words: list[str]) -> Command | None:
        """None for any other command."""
        namespace = None
        if words[:1] == ["nsenter"] and words[1].startswith("--net=") and words[2] == "--":
            namespace, words = words[1].removeprefix("--net="), words[3:]
        if mortal := words[:4] == MORTAL:
            words = words[4:]
        if words[:1] != [sys.executable]:
            return None
        words = words[2:] if words[1:2] == ["-P"] else words[1:]
        known = words[:1] == ["-m"] and words[1] in MODULES
        return cls(words[1], words[2:], namespace, mortal) if known else None


def _early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(EARLY)}


class ForkingPopen(_Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, by a fork of the template where that is the same."""

    def _execute_child(self, args: Any, *how: Any) -> None:  # type: ignore[override]
        (executable, preexec, close_fds, pass_fds, cwd, env, _startup, _flags, shell, *pipes, _restore) = how[:16]
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = pipes
        session, own_user = how[20], [x for x in how[16:19] if x is not None]
        command = [os.fspath(word) for word in args] if isinstance(args, list | tuple) else []
        environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (os.environ if env is None else env).items()}
        known = Command.parse(command)
        plain = not (shell or executable or preexec or pass_fds or own_user) and close_fds
        if known is None or not plain or _early(environment) != _early(dict(os.environ)):
            super()._execute_child(args, *how)
            return
        global _template
        with _starting:
            _template = _template or Template()
        request = {
            "module": known.module,
            "arguments": known.arguments,
            "namespace": known.namespace,
            "mortal": os.getpid() if known.mortal else 0,
            "command": command,
            "directory": os.fspath(cwd or Path.cwd()),
            "environment": environment,
            "session": bool(session),
        }
        ends = [end if end != -1 else usual for usual, end in enumerate((p2cread, c2pwrite, errwrite))]
        try:
            self.pid = _template.fork(request, ends)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


# The reaper


MARK = "ONESWEEP_TEST_RUN"  # in the environment of all that this process starts, and of all that these start
REAP = """
import os, pathlib, select, signal, sys, time
mark = sys.argv[1].encode()
select.select([int(sys.argv[2])], [], [])  # until the test process ends, however it does
found = True
while found:  # what one of them started meanwhile, too
    found = False
    for entry in pathlib.Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in entry.read_bytes().split(b"\\0") and (number := int(entry.parent.name)) != os.getpid():
                os.kill(number, signal.SIGKILL)
                found = True
        except OSError:
            pass
    time.sleep(0.2)
"""


def start_reaper() -> None:
    """Have all processes of this test process killed that outlive it, those that left its session included."""
    os.environ[MARK] = f"{os.getpid()}-{time.time_ns()}"
    mark = f"{MARK}={os.environ[MARK]}"
    descriptor = os.pidfd_open(os.getpid())
    plain = {name: value for name, value in os.environ.items() if name != MARK}
    command = [sys.executable, "-S", "-E", "-c", REAP, mark, str(descriptor)]
    _Popen(command, pass_fds=[descriptor], env=plain, start_new_session=True, stdin=subprocess.DEVNULL)
    os.close(descriptor)


def install() -> None:
    """From now on, in this process."""
    if sys.platform == "linux":
        start_reaper()
    if sys.platform == "linux" and sys.version_info[:2] == (3, 11):  # whose private method is overridden here
        subprocess.Popen = ForkingPopen  # type: ignore[misc]


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
