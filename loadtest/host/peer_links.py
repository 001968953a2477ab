"""Far links in `bench peers`: llama.cpp's RPC and our modes on the same hosts of a lab, in turns."""

import contextlib
import json
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

from loadtest.commands import Row, say
from loadtest.host.settings import PeerSettings
from loadtest.lab.profile import ROUTER
from loadtest.workload.prompts import NOVEL
from loadtest.workload.testbed import Network, check_network, default_hosts, deployed, open_network
from stages.errors import InputError, OnesweepError, ServiceError
from stages.wire.channel import parse_address

PROFILES = ("links-60", "links-20")
MODES = ("ar", "ar-speculative")
TOKENS = 128  # of each text
RPC = "llama.cpp RPC"
SERVER, CLIENT = "ggml-rpc-server", "llama-bench"  # on each host; on the router, which asks for tokens without a prompt


def check_peer_links(settings: PeerSettings) -> None:
    """Raise OnesweepError where links cannot be measured."""
    assert settings.rpc is not None
    if missing := [name for name in (SERVER, CLIENT) if not (settings.rpc / name).is_file()]:
        raise InputError(
            f"{settings.rpc} has no {' and no '.join(missing)}: "
            "build llama.cpp with -DGGML_RPC=ON, and give its build/bin"
        )
    for profile in PROFILES:
        check_network(profile, default_hosts(settings.checkpoint), settings.checkpoint)


def measure_links(settings: PeerSettings) -> list[Row]:
    """Seconds a token of one request, medians over the rounds. Raises OnesweepError."""
    rows = []
    for profile in PROFILES:
        taken: dict[str, list[float]] = {name: [] for name in (RPC, *MODES)}
        with open_network(profile, default_hosts(settings.checkpoint)) as network:
            for turn in range(settings.rounds):
                say(f"{profile}, round {turn + 1} of {settings.rounds} ...")
                taken[RPC].append(rpc_s(settings, network))
                for mode, seconds in our_s(settings, network, seed=turn).items():
                    taken[mode].append(seconds)
        found = {name: statistics.median(each) for name, each in taken.items()}
        rows += [Row(f"{profile}: {name}", seconds, "s a token") for name, seconds in found.items()]
        rows += [Row(f"{profile}: theirs over {mode}", found[RPC] / found[mode], "x") for mode in MODES]
    return rows


def rpc_s(settings: PeerSettings, network: Network) -> float:
    """A token by llama.cpp, whose layers lie on the hosts: they travel there first, which is not counted."""
    assert settings.rpc is not None
    with contextlib.ExitStack() as stack:
        for node in network.nodes[1:]:
            stack.enter_context(_serving(network, node, settings.rpc))
        hosts = ",".join(map(network.address, network.nodes[1:]))
        asked = ["-m", str(settings.source), "-p", "0", "-n", str(TOKENS), "-r", "1", "-t", "1", "-ngl", "99"]
        command = [str(settings.rpc / CLIENT), "--rpc", hosts, *asked, "-o", "json"]
        done = subprocess.run(network.command(ROUTER, command), capture_output=True, text=True)
    try:
        (figures,) = json.loads(done.stdout)
        return 1 / float(figures["avg_ts"])
    except (ValueError, KeyError, ZeroDivisionError):
        said = " ".join(done.stderr.split())[-300:]
        raise OnesweepError(f"{CLIENT} measured nothing (exit code {done.returncode}): {said}") from None


@contextlib.contextmanager
def _serving(network: Network, node: str, programs: Path) -> Iterator[None]:
    """A server of llama.cpp in a node, listening."""
    host, port = parse_address(network.address(node))
    # by lines, or what it says would stay in its buffer
    command = ["stdbuf", "-oL", str(programs / SERVER), "-H", host, "-p", str(port), "-t", "1"]
    with subprocess.Popen(
        network.command(node, command), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            if not any("endpoint" in line for line in iter(process.stdout.readline, "")):
                raise ServiceError(f"{SERVER} ended in {node}: start it by hand to see why")
            yield
        finally:
            process.kill()


def our_s(settings: PeerSettings, network: Network, seed: int) -> dict[str, float]:
    """A token of each mode, at temperature 1, with the prompt's trip: more than the peer is asked for."""
    found = {}
    with deployed(network, settings.checkpoint) as testbed:
        for mode in MODES:
            call = {"prompt": NOVEL.text(seed), "mode": mode, "max_tokens": TOKENS, "temperature": 1.0, "seed": seed}
            for _ in range(2):  # the first warms up
                (answer,) = testbed.caller.ask([call])
            if "error" in answer:
                raise OnesweepError(f"{mode}: {answer['error']}")
            found[mode] = answer["latency_ms"] / 1000 / answer["account"]["output_tokens"]
    return found
