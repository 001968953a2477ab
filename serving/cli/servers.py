"""A deployment's servers on this machine: their arguments, and the process that forks all of them.

`python -P -m serving.cli.servers NAME...` imports their modules once and forks each server: all share time and memory.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from serving.cli.__main__ import main
from serving.router.topology import Topology
from stages.errors import ServiceError
from stages.memory import with_large_pages
from stages.signals import LIFELINE_VARIABLE
from stages.wire.channel import is_loopback
from stages.wire.tokens import make_own_token

ROUTER, HTTP = "router", "http"  # process names of the router and the gateway
TOPOLOGY, RELEASES, RECORD = "topology.toml", "releases", "deployment.json"
# Command of a server; -P keeps Python from importing from the directory in which `up` is called.
MODULE = ["-P", "-m", "serving.cli"]
FORKED = [*MODULE[:-1], "serving.cli.servers"]
PRELOADED = {
    "host": ("stages.host.server", "stages.backends.onnx"),
    "router": ("serving.router.server",),
    "http": ("serving.gateway.app",),
}
PR_SET_NAME = 15  # Linux: sets the name in `top`, since forked processes share one command


def server_arguments(
    topology: Topology,
    checkpoint: Path,
    directory: Path,
    *,
    threads: int = 1,
    host_options: Sequence[str] = (),
    router_options: Sequence[str] = (),
    http: str | None = None,
    hosts_run: bool = False,
    second: str | None = None,
) -> dict[str, list[str]]:
    """Arguments of `onesweep` by process name, the hosts first. Creates the servers' own tokens.

    :param directory: holds the file TOPOLOGY and the folder RELEASES.
    :param threads: per host.
    :param host_options: further options of every `onesweep host`, such as ("--insecure",).
    :param router_options: further options of `onesweep router`.
    :param http: address of a gateway, if any.
    :param hosts_run: the hosts run elsewhere: only router and gateway are started, and they end with this process.
    :param second: address of a second router, which deploys nothing; also its name.
    """
    releases, found = directory / RELEASES, dict[str, list[str]]()
    common = ["--topology", str(directory / TOPOLOGY), "--checkpoint", str(checkpoint)]
    for host in () if hosts_run else topology.hosts:
        own = ["--threads", str(threads), "--releases", str(releases / host.name), *host_options]
        found[host.name] = ["host", host.name, *common, *own]
        if topology.certificates is None:
            found[host.name] += _guard(directory / f"{host.name}.tokens", found[host.name], host.address, host.listen)
    router = ["router", *common, *router_options]
    router += _guard(directory / f"{ROUTER}.tokens", router, topology.router, *([second] if second else []))
    found[ROUTER] = [*router, "--releases", str(releases / ROUTER)]
    if second is not None:
        found[second] = [*router, "--listen", second]
    if http is not None:
        tls = ["--tls-ca", str(topology.client_tls.authority)] if topology.client_tls else []
        found[HTTP] = ["http", "--listen", http, "--router", topology.router, *tls]
    return found


def _guard(path: Path, arguments: Sequence[str], *addresses: str) -> list[str]:
    """The option that makes a local server require its own token, unless another option sets its access."""
    if {"--tokens", "--anybody"} & {*arguments} or not all(map(is_loopback, addresses)):
        return []
    make_own_token(path, *addresses)
    return ["--tokens", str(path)]


def fork_servers(directory: Path, servers: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Start named servers with their arguments, logging to `directory`; returns their process ids. Linux only, since
    elsewhere libraries do not survive a fork. Raises ServiceError if not all start."""
    with subprocess.Popen(
        [sys.executable, *FORKED, *servers],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=with_large_pages() | {LIFELINE_VARIABLE: ""},
    ) as starter:
        try:
            _, errors = starter.communicate(json.dumps({"directory": str(directory), "servers": servers}))
        except BaseException:
            starter.terminate()
            starter.wait()  # by then all its forks are recorded
            raise
    if starter.returncode:
        raise ServiceError(f"servers cannot start: {errors.strip().rpartition(chr(10))[2]}")
    return recorded(directory)


def recorded(directory: Path) -> dict[str, int]:
    """Process ids of a deployment's servers, by name. Raises OSError, or ValueError and the like for a bad record."""
    record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    return {str(name): int(pid) for name, pid in record["processes"].items()}


def record_processes(directory: Path, processes: Mapping[str, int]) -> None:
    """Write the record that `recorded` reads."""
    (directory / RECORD).write_text(json.dumps({"processes": processes}), encoding="utf-8")


def _fork() -> int:
    """Fork each server in turn and record the process ids; returns the exit code."""
    parent, given, pids = os.getppid(), json.load(sys.stdin), dict[str, int]()
    directory = Path(given["directory"])
    for module in (module for arguments in given["servers"].values() for module in PRELOADED[arguments[0]]):
        importlib.import_module(module)
    if os.getppid() != parent:
        return 1  # the caller no longer waits for them
    gc.collect()
    gc.freeze()  # a garbage collection would write to shared memory
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # between a fork and its record
    for name, arguments in given["servers"].items():
        if (pid := os.fork()) == 0:
            os.setsid()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())
            with open(os.devnull) as nothing, (directory / f"{name}.log").open("wb") as log:
                for file, descriptor in ((nothing, 0), (log, 1), (log, 2)):
                    os.dup2(file.fileno(), descriptor)
            return main(arguments)
        pids[name] = pid
        record_processes(directory, pids)  # at once, so that `down` finds them whatever happens to the waiting process
    os._exit(0)  # skip tearing down the imports, which takes half a second


if __name__ == "__main__":
    sys.exit(_fork())
