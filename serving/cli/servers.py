"""The servers of a deployment on this machine: their arguments, and the one process that becomes all of them.

`python -P -m serving.cli.servers NAME...` imports once what they need and forks each: memory and time of it are shared.
"""

from __future__ import annotations

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

ROUTER, HTTP = "router", "http"  # what the processes of the router and the gateway are called
TOPOLOGY, RELEASES, RECORD = "topology.toml", "releases", "deployment.json"
# How a server is started: -P, because the directory that `up` is called in is not for importing from.
MODULE = ["-P", "-m", "serving.cli"]
FORKED = [*MODULE[:-1], "serving.cli.servers"]
PRELOADED = {
    "host": ("stages.host.server", "stages.backends.onnx"),
    "router": ("serving.router.server",),
    "http": ("serving.gateway.app",),
}
PR_SET_NAME = 15  # Linux: what `top` shows, for the forked have one command


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
    """Arguments of `onesweep` by the name of the process, the hosts first. Makes their own tokens.

    :param directory: has the file TOPOLOGY, and the folder RELEASES.
    :param threads: of each host.
    :param host_options: more options of every `onesweep host`, such as ("--insecure",).
    :param router_options: more options of `onesweep router`.
    :param http: where a gateway listens, too.
    :param hosts_run: the hosts are up elsewhere: only router and gateway are started, and end with this process.
    :param second: where a second router listens, which deploys nothing; its name is its address.
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
    """The option that has a server on this machine ask for its own token, where no other says who may ask it."""
    if {"--tokens", "--anybody"} & {*arguments} or not all(map(is_loopback, addresses)):
        return []
    make_own_token(path, *addresses)
    return ["--tokens", str(path)]


def fork_servers(directory: Path, servers: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Start servers by name, each with its arguments; their logs are in `directory`. Linux only: elsewhere libraries
    may not be used after a fork. Returns their process ids. Raises ServiceError where not all start."""
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
            starter.wait()  # all that it forked is recorded then
            raise
    if starter.returncode:
        raise ServiceError(f"servers cannot start: {errors.strip().rpartition(chr(10))[2]}")
    return recorded(directory)


def recorded(directory: Path) -> dict[str, int]:
    """Process ids of the servers of a deployment, by name. Raises OSError, or ValueError and the like for no record."""
    record = json.loads((directory / RECORD).read_text(encoding="utf-8"))
    return {str(name): int(pid) for name, pid in record["processes"].items()}


def record_processes(directory: Path, processes: Mapping[str, int]) -> None:
    """Have `recorded` find these."""
    (directory / RECORD).write_text(json.dumps({"processes": processes}), encoding="utf-8")


def _fork() -> int:
    """Become each server in turn; the one that forks records their process ids. The exit code."""
    parent, given, pids = os.getppid(), json.load(sys.stdin), dict[str, int]()
    directory = Path(given["directory"])
    for module in (module for arguments in given["servers"].values() for module in PRELOADED[arguments[0]]):
        importlib.import_module(module)
    if os.getppid() != parent:
        return 1  # nobody waits for them any more
    gc.collect()
    gc.freeze()  # a collection would write to what is shared
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
        record_processes(directory, pids)  # at once: whatever happens to who waits, `down` finds them
    os._exit(0)  # what the imports made takes half a second to end


if __name__ == "__main__":
    sys.exit(_fork())
