"""A lab's life: made, found, stopped, and killed in every way, with nothing left."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from loadtest.lab import lab as module
from loadtest.lab.lab import Lab, lab_problem, temporary_lab
from loadtest.lab.namespaces import LabError, processes_in
from loadtest.lab.profile import Link, Profile
from stages.errors import InputError
from stages.signals import start_ticks
from tests.conftest import until

NEAR = Profile("near", Link(delay_ms=1))


def holders(nodes: set[int]) -> set[tuple[int, int]]:
    """Processes, by id and start, that are in one of these network namespaces or hold it open."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            kept = [entry for entry in (process / "fd").iterdir() if os.readlink(entry).startswith("net:[")]
            if any(entry.stat().st_ino in nodes for entry in (process / "ns/net", *kept)):
                found.add((int(process.name), start_ticks(int(process.name))))
    return found


def namespaces_are_free(nodes: set[int]) -> bool:
    """No process keeps these namespaces. A process that came later may be in a new one with a number of theirs."""
    first = holders(nodes)
    return until(lambda: not first & holders(nodes))


def namespaces(lab: Lab) -> set[int]:
    return {os.stat(node.namespace).st_ino for node in lab.places.values()}


def gone(lab: Lab, nodes: set[int]) -> bool:
    """The lab's process is over, and no process is in a namespace of it, or keeps one."""
    return until(lambda: not lab.is_up) and namespaces_are_free(nodes)


def sleeper(lab: Lab, node: str, **how: Any) -> subprocess.Popen[bytes]:
    """A program in a node that has certainly arrived there."""
    process = subprocess.Popen(lab.command(node, ["sleep", "1000"], **how))
    until(lambda: process.pid in processes_in({os.stat(lab.places[node].namespace).st_ino}))
    return process


def test_nodes_have_addresses_and_commands(needs_lab: None) -> None:
    with temporary_lab(NEAR, 2) as lab:
        nodes = namespaces(lab)
        assert tuple(lab.places) == ("router", "host-1", "host-2")
        assert len({lab.address(node) for node in lab.places}) == 3
        assert lab.is_up
        argv = lab.command("host-2", [sys.executable, "-c", "import sys; sys.exit(5)"])
        assert subprocess.run(argv).returncode == 5
        with pytest.raises(InputError, match="no node 'host-3' in the lab; its nodes are router, host-1, host-2"):
            lab.command("host-3", ["true"])
    assert gone(lab, nodes)


def test_killing_the_lab_process_removes_the_lab(needs_lab: None) -> None:
    with temporary_lab(NEAR, 2) as lab:
        nodes, inside = namespaces(lab), [sleeper(lab, "host-1"), sleeper(lab, "router", outlives_parent=True)]
        os.kill(lab.pid, signal.SIGKILL)
        assert [process.wait(10) for process in inside] == [-signal.SIGKILL] * 2
        assert gone(lab, nodes)
        with pytest.raises(LabError, match="does not answer"):
            lab.cut("router", "host-1")


OWNER = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
    from loadtest.lab.lab import temporary_lab
    from loadtest.lab.namespaces import processes_in
    from loadtest.lab.profile import Link, Profile

    with temporary_lab(Profile("p", Link()), 1) as lab:
        inside = subprocess.Popen(lab.command("host-1", ["sleep", "1000"]))
        starts = "import subprocess; subprocess.run(['sleep', '1000'], start_new_session=True)"
        subprocess.Popen(lab.command("router", [sys.executable, "-c", starts]))
        inodes = {os.stat(node.namespace).st_ino for node in lab.places.values()}
        while len(processes_in(inodes)) < 3:
            time.sleep(0.01)
        print(*processes_in(inodes), lab.pid, flush=True)
        print(*inodes, flush=True)
        time.sleep(1000)
    """
)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_owner_removes_the_lab(needs_lab: None, how: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    nodes = {int(inode) for inode in owner.stdout.readline().split()}
    assert (len(pids), len(nodes)) == (4, 2)
    assert all(start_ticks(pid) for pid in pids)
    owner.send_signal(how)
    owner.wait(30)
    owner.stdout.close()
    until(lambda: not any(start_ticks(pid) for pid in pids))
    assert namespaces_are_free(nodes)


def test_the_reason_why_no_lab_can_be_made_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in lab_problem()
    with pytest.raises(LabError, match="needs root"), temporary_lab(NEAR, 1):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(module.shutil, "which", lambda name: None if name == "setpriv" else f"/bin/{name}")
    assert lab_problem() == "the program setpriv is missing: install the package util-linux"
    monkeypatch.undo()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs Linux" in lab_problem()


DIALLER = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=0.5)"


def test_a_link_is_cut_and_restored_while_others_work(needs_lab: None) -> None:
    with temporary_lab(NEAR, 2) as lab:

        def error(target: str) -> str:
            dialler = lab.command("router", [sys.executable, "-c", DIALLER, lab.address(target)])
            return subprocess.run(dialler, capture_output=True, text=True).stderr.splitlines()[-1].partition(":")[0]

        lab.cut("host-1", "router")
        assert error("host-1") == "TimeoutError"
        assert error("host-2") == "ConnectionRefusedError"
        lab.cut("router", "host-1", is_cut=False)
        assert error("host-1") == "ConnectionRefusedError"
        with pytest.raises(InputError, match="no node 'host-9'"):
            lab.cut("router", "host-9")
