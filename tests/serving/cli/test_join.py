"""`onesweep serve` and `join`: three machines without a file, a certificate or an open port; two have gateways."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadtest.lab.lab import Lab, lab_problem, temporary_lab
from loadtest.lab.namespaces import DEVICE, GATEWAY_ADDRESS, SUBNET
from loadtest.lab.profile import profile_named
from serving.cli.deployment import MIN_RUN_S, temporary_deployment
from serving.cli.ports import free_port_block, port_free
from serving.cli.servers import MODULE, RECORD
from serving.client.client import Client
from serving.router.topology import local_topology
from stages.wire.tls import Tls
from tests.conftest import Run, until
from tests.stages.importing.published import SHAPE, fitted, write_folder

pytestmark = pytest.mark.slow

WITHIN_S = 180.0
ASKED = ("the sea", "--mode", "ar", "--temperature", "0", "--max-tokens", "8")
LONG = ("generate", *ASKED[:-1], "40")


class Process:
    """A command with its words in a file, in a node of a lab or none."""

    def __init__(self, log: Path, *arguments: object, state: Path, inside: Sequence[str] = ()) -> None:
        own = {"XDG_STATE_HOME": str(state), "XDG_CACHE_HOME": f"{state}-cache", "ONESWEEP_STATE": f"{state}-up"}
        environment = {**os.environ, **own}
        with log.open("ab") as file:
            command = [*inside, sys.executable, *MODULE, *map(str, arguments)]
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        self.log, self.environment, self.inside = log, environment, inside

    def expect(self, pattern: str) -> str:
        """The first match in its output, now or later."""

        def first_match() -> str | None:
            found = re.search(pattern, self.log.read_text())
            assert found or self.process.poll() is None, self.log.read_text()
            return found[0] if found else None

        return until(first_match, WITHIN_S)

    def ask(self, *arguments: object, act: Callable[[], object] = lambda: None) -> str:
        """The output of another command on the same machine. :param act: called after the first letter."""
        command = [*self.inside, sys.executable, *MODULE, *map(str, arguments)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=self.environment) as asked:
            text, times_s = asked.stdout.read(1), [time.monotonic()]
            act()
            while piece := asked.stdout.read1():
                text, times_s = text + piece, [*times_s, time.monotonic()]
            _, problem = asked.communicate(timeout=WITHIN_S)
        assert asked.returncode == 0, problem.decode()
        print(f"{max((b - a for a, b in pairwise(times_s)), default=0):.1f} s without a letter")
        return text.decode()

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(WITHIN_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole_groups = replace(SHAPE, head_dim=8)
    return write_folder(tmp_path_factory.mktemp("model"), fitted(whole_groups), whole_groups)


@pytest.fixture
def expected(model: Path, tmp_path: Path, onesweep: Run) -> str:
    """The text of one host."""
    code, _, err = onesweep("import", model, "--blocks", 1, "--out", tmp_path / "whole")
    assert code == 0, err
    topology = local_topology(1, 1, tmp_path / "whole", free_port_block(2) + 1)
    with temporary_deployment(topology, tmp_path / "whole"):
        code, text, err = onesweep("generate", *ASKED, "--router", topology.router)
    assert code == 0, err
    return text


@contextlib.contextmanager
def serving(model: Path, tmp_path: Path, port: int, *options: object, **where: Any) -> Iterator[Process]:
    """:param port: and the next two."""
    at = ["--port", port, "--http", f"127.0.0.1:{port + 1}", "--listen", f"0.0.0.0:{port + 2}", *options]
    process = Process(tmp_path / "serve.log", "serve", model, *at, state=tmp_path / "state", **where)
    try:
        yield process
    finally:
        process.end()


@contextlib.contextmanager
def joined(
    tmp_path: Path, ticket: str, *names: str, lab: Lab | None = None, options: Sequence[object] = ()
) -> Iterator[list[Process]]:
    with contextlib.ExitStack() as stack:
        processes = []
        for name in names:
            where: Any = {"state": tmp_path / "machines", "inside": lab.command(name, []) if lab else ()}
            own = "--name", name, "--threads", 1, *options
            one = Process(tmp_path / f"{name}.log", "join", ticket, *own, **where)
            stack.callback(one.end)
            processes.append(one)
        yield processes


def test_machines_join_with_a_ticket_and_keep_their_stages(model: Path, expected: str, tmp_path: Path) -> None:
    port = free_port_block(3)
    with contextlib.ExitStack() as stack:
        with serving(model, tmp_path, port, "--wait", 3) as serve:
            ticket = serve.expect(r"onesweep-[\w-]+")
            stack.enter_context(joined(tmp_path, ticket, "paris", "tokyo", "austin"))
            serve.expect("Ctrl-C stops them")
            log = serve.log.read_text()
            assert log.count(" MB sent, blocks ") == 3
            assert "the last host drafts with: copy:q8" in log
            assert serve.ask("generate", *ASKED) == expected != ""
            assert serve.ask("doctor")
            late = Process(tmp_path / "late.log", "join", ticket, "--name", "oslo", state=tmp_path / "machines")
            assert "this ticket was already used" in late.expect("already used[^\n]*|Ctrl-C") or late.log.read_text()
            assert late.process.wait(WITHIN_S) == 2
        (tmp_path / "serve.log").unlink()
        with serving(model, tmp_path, port) as serve:
            serve.expect("Ctrl-C stops them")
            assert "MB sent" not in serve.log.read_text()
            assert "importing" not in (log := serve.log.read_text())
            assert len(re.findall("; to [a-z]+: direct, ", log)) == 3
            assert serve.ask("generate", *ASKED) == expected


def test_machines_join_and_leave_while_the_ring_serves(
    model: Path, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONESWEEP_STATE", str(tmp_path / "state-up"))
    port = free_port_block(3)

    def holders(name: str) -> list[str]:
        """Machines that hold the blocks of one."""
        hosts = {host["name"]: host["blocks"] for host in json.loads(serve.ask("status", "--json"))["hosts"]}
        return sorted(each for each, blocks in hosts.items() if blocks == hosts.get(name))

    def texts(stop: threading.Event) -> set[str]:
        """The texts of requests without a pause between them: the ring always changes under one."""
        found = set[str]()
        with Client(f"127.0.0.1:{port}", tls=Tls(tmp_path / "state/onesweep/run/ca.pem")) as client:
            while not stop.is_set():
                found.add(client.generate("the sea", mode="ar", temperature=0.0, max_tokens=8).text)
        return found

    with contextlib.ExitStack() as stack, serving(model, tmp_path, port, "--wait", 3) as serve:
        ticket = serve.expect(r"onesweep-[\w-]+")
        machines = stack.enter_context(joined(tmp_path, ticket, "paris", "tokyo", "austin"))
        serve.expect("Ctrl-C stops them")
        log = serve.log.read_text()
        assert log.index("the ring, in this order:") < log.index(" MB sent")
        line = r"\d[.] \w+: layers \d-\d, [\d.,]+ of [\d,]+ MB, speed [\d.]+; to \w+: direct, [\d.]+ ms"
        assert len(re.findall(line, log)) == 3
        copy = shutil.copytree(model, tmp_path / "copy")
        invited = serve.ask("invite", "oslo").split()[-1]
        (oslo,) = stack.enter_context(joined(tmp_path, invited, "oslo", options=("--model", copy)))
        with ThreadPoolExecutor(1) as pool:
            stop = threading.Event()
            asked = pool.submit(texts, stop)
            try:
                serve.expect("the ring is now: .*oslo")
                oslo.expect("bytes from local copy")
                (twin,) = {*until(lambda: {*holders("oslo")} - {"oslo"}, WITHIN_S)}
                leaver = next(each for each in machines if each.log.stem == twin)
                leaver.end()
                serve.expect(f"{twin} is leaving")
                until(lambda: holders("oslo") == ["oslo"], WITHIN_S)
                assert "direct, " in serve.ask("status")
            finally:
                stop.set()
            assert asked.result(WITHIN_S) == {expected.strip("\n")}
        # one without a twin: a neighbour takes its blocks over, beside its own
        (last, *_) = [each for each in machines if each is not leaver]
        last.end()
        until(lambda: holders(last.log.stem) == [] and len(holders("oslo")) == 1, WITHIN_S)
        assert serve.ask("generate", *ASKED) == expected
        for machine in (*machines, oslo):
            serve.ask("invite", "--revoke", machine.log.stem)
        serve.expect("are on no machine")
        with pytest.raises(AssertionError, match=r"cannot answer requests now: .*blocks .* are on no machine"):
            serve.ask("generate", *ASKED)  # much sooner than it waits for a router
        serve.process.kill()
        until(lambda: port_free("127.0.0.1", port), WITHIN_S)


@pytest.mark.skipif(bool(lab_problem()) or shutil.which("nft") is None, reason="it takes root on Linux, and nftables")
def test_machines_behind_gateways_and_a_firewall_write_the_same_text(
    model: Path, expected: str, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(temporary_lab(profile_named("nat"), 3))
        where = {"inside": lab.command("router", [])}
        serve = stack.enter_context(serving(model, tmp_path, 7700, "--wait", 3, **where))
        ticket = serve.expect(r"onesweep-[\w-]+")
        with joined(tmp_path, ticket, "host-1", "host-2", "host-3", lab=lab):
            serve.expect("Ctrl-C stops them")
            assert serve.ask("generate", *ASKED) == expected
            served_at, whole = time.monotonic(), serve.ask(*LONG)
            shown = until(lambda: (text := serve.ask("status")).count(" MB so far") == 3 and text, WITHIN_S)
            assert "host-1 and host-2 relay through the router: open TCP" in shown

            def orders(node: str, *given: str) -> None:
                for each in given:
                    subprocess.run(lab.command(node, ["ip", *each.split()]), check=True)

            def kill_the_router() -> None:
                record = json.loads((tmp_path / "state-up" / "127.0.0.1:7700" / RECORD).read_text())
                os.kill(record["processes"]["router"], signal.SIGKILL)

            # the gateway is away for a moment, and forgets its mappings: open connections die and are opened again
            route = f"route add {SUBNET} dev {DEVICE} src {lab.address('gateway-1')}"
            forget = partial(orders, "gateway-1", f"link set {DEVICE} down", f"link set {DEVICE} up", route)
            home = "address flush dev eth0", "address add 192.168.1.99/24 dev eth0"
            move = partial(orders, "host-2", *home, f"route add default via {GATEWAY_ADDRESS}")
            until(lambda: time.monotonic() > served_at + MIN_RUN_S)  # a router that ends sooner is not started again
            for act in (forget, move, kill_the_router):
                assert serve.ask(*LONG, act=act) == whole
            serve.process.kill()
            serve.process.wait(WITHIN_S)
            serve.log.unlink()
            serve = stack.enter_context(serving(model, tmp_path, 7700, **where))
            serve.expect("Ctrl-C stops them")
            assert serve.ask("generate", *ASKED) == expected
