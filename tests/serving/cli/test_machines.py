"""A machine's place in a run: made with a ticket, found again, renewed; mistakes are explained."""

import argparse
import asyncio
import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from serving.cli import machine_ring, machines, remote
from serving.cli.deployment import Deployment
from serving.cli.generate import router_here
from serving.cli.ports import free_port_block
from serving.cli.remote import _rendezvous, ticket_of
from serving.cli.serve import status_lines
from serving.client.result import HostsLost, unready_words
from serving.router.topology import local_topology
from serving.v1 import router_pb2
from stages.errors import InputError, OnesweepError, ServiceError
from stages.progress import ProgressLine
from stages.wire import tickets
from stages.wire.auth import HOST, Identity
from stages.wire.certificates import make_request
from stages.wire.channel import LINKS_VARIABLE, bind
from stages.wire.links import DIRECT, link_name
from stages.wire.rendezvous import Machine, Rendezvous, RunDirectory
from stages.wire.tickets import JoinedMachine, Ticket
from tests.conftest import eventually


@pytest.fixture
def rendezvous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rendezvous]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv(LINKS_VARIABLE, "")
    run = RunDirectory(machines.run_directory())
    options = argparse.Namespace(listen=f"127.0.0.1:{free_port_block(1)}", address=None)
    with _rendezvous(run, options, lambda line: None) as running:
        yield running


def ticket(rendezvous: Rendezvous, uses: int = 1, name: str = "") -> Ticket:
    _, secret = rendezvous.run.invitations.add(uses, 1, name)
    return Ticket.parse(ticket_of(rendezvous.run, secret))


@contextlib.contextmanager
def place(ticket: Ticket | None, name: str | None = None) -> Iterator[JoinedMachine]:
    with ExitStack() as stack:
        yield machines._place(ticket, name, stack)


def test_a_machine_joins_once_and_resumes_its_place(rendezvous: Rendezvous) -> None:
    given = ticket(rendezvous)
    with place(given, "paris") as first:
        assert (first.name, [*rendezvous.machines]) == ("paris", ["paris"])
        certificate = first.tls.own(HOST)
        assert certificate.identity == Identity(HOST, "paris")
        for again, name, says in ((given, "paris", "another process serves from"), (None, None, "already runs here")):
            with pytest.raises(OnesweepError, match=says), place(again, name):
                pass
    for again in (given, None):
        with place(again, "paris") as found:
            assert found == first
    with pytest.raises(InputError, match="this machine has joined no run as 'rome'"), place(None, "rome"):
        pass
    with patch.object(tickets, "ticking", wraps=tickets.ticking) as waits, place(None) as found:
        assert found == first, "the only one, whatever this computer is called"
        waits.assert_called_once_with(f"waiting for the router at {first.rendezvous[0]}")
    del rendezvous.machines["paris"]
    with pytest.raises(ServiceError, match="no longer admits this machine: give a new ticket"), place(None):
        pass
    with place(ticket(rendezvous), "paris") as again:
        assert again.secret != first.secret, "a removed machine returns with a new ticket"
    (again.directory / "lock").unlink()
    (again.directory / "lock").mkdir()
    with pytest.raises(OnesweepError, match=r"cannot write .*lock: Is a directory"), place(None):
        pass


def test_machines_of_a_computer_differ_in_name(
    rendezvous: Rendezvous, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        place(given := ticket(rendezvous, uses=3)) as one,
        place(given) as two,
        place(ticket(rendezvous, 1, "oslo")) as other,
    ):
        assert two.name == f"{one.name[:28]}-2"
        assert other.name == "oslo", "the name of the ticket"
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another computer"))
        with pytest.raises(InputError, match="this ticket is for a machine named lyon: omit --name"):
            machines._place(named := ticket(rendezvous, 1, "lyon"), "rome", ExitStack())
        taken = "a machine named oslo has already joined"
        for given, name in ((ticket(rendezvous), "oslo"), (ticket(rendezvous, 1, "oslo"), None)):
            with pytest.raises(InputError, match=taken), place(given, name):
                pass
        with place(named) as there:
            assert there.name == "lyon"
        for again in (named, None):
            with place(again, "lyon") as found:
                assert found == there, "by the name of its ticket, too"


def test_a_ticket_with_a_wrong_server_or_secret_is_refused(rendezvous: Rendezvous) -> None:
    given, silent = ticket(rendezvous), f"127.0.0.1:{free_port_block(1)}"
    for wrong, error, says in (
        (replace(given, fingerprint="0" * 64), ServiceError, "is not the ticket's"),
        (replace(given, addresses=(silent,)), ServiceError, r"does not answer \(Connection refused\)"),
        (replace(given, secret="guess"), InputError, "the router does not know this ticket"),
    ):
        with pytest.raises(error, match=says), place(wrong):
            pass
    assert rendezvous.refused["Enrol"] == 1


def test_a_certificate_is_renewed_before_it_expires(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    with place(ticket(rendezvous), "paris") as there:
        path = there.directory / "machine.pem"
        request = make_request(there.directory / "machine.key", "paris")
        short = rendezvous.run.authority.certify(request, Identity(HOST, "paris"), (link_name("paris"),), 1)
        path.write_bytes(short)

        async def checked() -> None:
            renewing = asyncio.create_task(tickets.renew(there))
            await eventually(lambda: path.read_bytes() != short)
            renewing.cancel()

        asyncio.run(checked())
        assert (there.tls.own(HOST).until - rendezvous.run.authority.until).days < -1000
        before = path.read_bytes()
        monkeypatch.setattr(tickets, "CHECK_S", 0)
        with contextlib.suppress(TimeoutError):
            asyncio.run(asyncio.wait_for(tickets.renew(there), 0.1))
        assert path.read_bytes() == before, "one that is good for weeks stays"


def test_a_damaged_or_missing_place_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(InputError, match="this machine has joined no run"), place(None):
        pass
    run = tmp_path / "onesweep" / "joined" / "0123456789abcdef" / "paris"
    run.mkdir(parents=True)
    os.chmod(run, 0o700)
    (run / "machine.json").write_text(json.dumps({"name": "paris"}))
    for name, says in (("paris", "is damaged: remove"), ("Paris!", "lower-case letters, digits and dashes")):
        with pytest.raises(InputError, match=says), place(None, name):
            pass


def test_a_shared_state_directory_is_refused_before_the_ticket_is_used(
    rendezvous: Rendezvous, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONESWEEP_STATE", str(tmp_path))
    os.chmod(tmp_path, 0o755)
    given = argparse.Namespace(ticket=ticket(rendezvous).text(), threads=None)
    with pytest.raises(ServiceError, match="nobody else may enter it"):
        machines.run_join(given)
    with pytest.raises(ServiceError, match="nobody else may enter it"):
        bind(None, "127.0.0.1:0")  # type: ignore[arg-type]  # before anything is done with the server
    assert not rendezvous.machines


def test_serve_waits_for_machines_until_they_join_or_are_removed(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now, lines, run = 0.0, list[str](), rendezvous.run
    used, _ = run.invitations.add(1, 1)
    run.invitations.use(used)
    monkeypatch.setattr(remote, "monotonic", lambda: now)
    monkeypatch.setattr(remote, "POLL_S", 0)

    def waited(passes: Callable[[], object], wait: int | None = None) -> list[str]:
        progress = ProgressLine()
        monkeypatch.setattr(progress, "at", lambda line: (lines.append(line), passes()))
        return remote._wait(rendezvous, run, argparse.Namespace(wait=wait), progress)

    def pass_time(seconds: float = remote.REPLACE_AFTER_S + 1) -> None:
        nonlocal now
        now += seconds

    def invite(name: str = "", **given: object) -> int:
        default = {"name": name, "uses": None, "days": None, "revoke": None}
        return remote.run_invite(argparse.Namespace(**default | given))

    def come(name: str) -> None:
        rendezvous.machines[name].notices = asyncio.Queue()

    for name in ("paris", "tokyo", "oslo", "rome"):
        run.keep(name, machine := Machine(name, ""))
        rendezvous.machines[name] = machine
    (run.directory / machine_ring.ORDER_NAME).write_text('["tokyo", "paris"]')
    come("oslo")
    come("paris")
    then = iter((lambda: pass_time(remote.ADVISE_AFTER_S + 1), lambda: come("tokyo")))
    assert waited(lambda: next(then)()) == ["paris", "tokyo"], "the others join the ring while it serves"
    away = "waiting for machines: 2 of 2 (paris, oslo); missing: tokyo"
    assert lines == [away, f"{away} (`onesweep invite --revoke tokyo` removes it, --wait 2 starts with these)"]
    rendezvous.machines["tokyo"].notices = None
    assert waited(lambda: None, wait=2) == ["paris", "oslo"]

    assert waited(pass_time) == ["paris", "oslo"], "others replace a machine that stays away"
    with pytest.raises(InputError, match=r"or machine 'tokio' \(did you mean tokyo.*; choose from paris, tok.*rome$"):
        invite(revoke="tokio")
    with pytest.raises(InputError, match="--revoke makes no ticket: leave out --days, or --revoke"):
        invite(revoke="tokyo", days=3.0)
    _, made = invite("lima", days=2.0), capsys.readouterr()
    assert invite(revoke="") == 0
    *listed, ticket_line = capsys.readouterr().out.splitlines()
    assert listed == [f"machine {name}" for name in run.machines()]
    shown = re.fullmatch(r"ticket (\w+) +lima  1 use  until 20..-..-.. at ..:.. UTC", ticket_line)
    assert shown[1] in made.err
    assert (invite(revoke="tokyo"), invite(revoke=used.id)) == (0, 0)
    assert waited(lambda: rendezvous.remove_machines({"tokyo"} - run.machines().keys())) == ["paris", "oslo"]
    assert "missing: tokyo" in lines[-1]
    rendezvous.machines["oslo"].notices = None
    lines.clear()
    assert waited(lambda: come("oslo")) == ["paris", "oslo"]
    assert lines == ["waiting for machines: 1 of 2 (paris)"], "rome was in no ring"


def test_other_commands_report_which_machines_serve_waits_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("ONESWEEP_STATE", str(tmp_path / "up"))
    router, waits = "127.0.0.1:7700", "waiting for machines: 1 of 2 (paris)"
    with machines.locked(machines.run_directory()):
        assert not (tmp_path / "onesweep").stat().st_mode & 0o077
        with pytest.raises(ServiceError, match="another process serves"), machines.locked(machines.run_directory()):
            pass
        assert (machines.served_here(router), router_here(None)[0]) == ("", router), "nothing was said yet"
        remote._RecordedProgress(router).at(waits)
        for named in (router, "localhost:7700", None):
            assert machines.served_here(named) == f"`onesweep serve` runs here, but has no router yet: {waits}"
        assert machines.served_here("127.0.0.1:7711") == "", "another one's router"
        remote._RecordedProgress("127.0.0.1:7722").at(waits)
        assert router_here(None) == ("127.0.0.1:7722", None)
    (machines.run_directory() / machines.DOING_NAME).write_text('{"process": 1, "began": 0}')
    assert (machines.served_here(router), router_here(None)[0]) == ("", router), "it ended"
    (machines.run_directory() / machines.DOING_NAME).unlink()
    (machines.run_directory() / machines.DOING_NAME).mkdir()
    serving = remote._RecordedProgress(router)
    serving.at(waits)  # it serves on where nothing can be recorded
    (machines.run_directory() / machines.DOING_NAME).rmdir()
    serving.at(waits)
    assert machines.served_here(router), "it is recorded as soon as it can be"


def test_links_of_a_machine_that_does_not_answer_are_not_shown() -> None:
    links = [router_pb2.LinkStatus(to="oslo", kind=DIRECT, rtt_ms=20.0)]
    there = router_pb2.HostStatus(name="paris", ready=True, rtt_ms=9.0, links=links)
    away = router_pb2.HostStatus(name="tokyo", reason="did not answer", links=links)
    lines = [*status_lines(router_pb2.StatusResponse(hosts=[there, away]))]
    assert [" ".join(line.split()) for line in lines if "to oslo" in line] == ["to oslo direct, 20.0 ms"]


def test_a_reason_quoted_by_other_hosts_is_shown_once() -> None:
    hosts = [router_pb2.HostStatus(name=name, reason=f"{name}waits for c: is gone") for name in ("a ", "b ", "")]
    status = router_pb2.StatusResponse(hosts=hosts)
    assert unready_words(status) == "waits for c: is gone"
    status.hosts.add(reason="d is lost", lost=True)
    words, lines = unready_words(status), list[str]()
    assert (type(words), words) == (HostsLost, "d is lost")
    starting = Deployment(local_topology(1, 3, Path()), Path(), {})
    starting.wait_ready(lines.append, iter([words, ""]))
    assert lines == ["the hosts start"]


def test_a_machine_of_the_ring_may_be_away_for_a_minute(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, names = 0.0, ("paris", "tokyo", "oslo")
    monkeypatch.setattr(machine_ring, "monotonic", lambda: now)
    ring = machine_ring.MachineRing(
        rendezvous, machine_ring.nobody("127.0.0.1:1", rendezvous.run.directory), ProgressLine()
    )
    ring.topology = ring._topology({"paris": (0,), "tokyo": (1,)})
    for name in names:
        rendezvous.machines[name] = Machine(name, "", notices=asyncio.Queue())
    assert ring._situation() == ({*names}, {*names})
    for name in ("tokyo", "oslo"):
        rendezvous.machines[name].notices = None
    now = machine_ring.GONE_S - 1
    assert ring._situation() == ({"paris"}, {"paris", "tokyo"})
    now += 2
    assert ring._situation() == ({"paris"}, {"paris"})
    ring.topology, rendezvous.machines["tokyo"].notices = ring._topology({"tokyo": (0,)}), asyncio.Queue()
    ring._situation()
    rendezvous.remove_machines(["tokyo"])
    assert ring._situation() == ({"paris"}, {"paris"}), "a removed machine is not awaited"
    rendezvous.machines["paris"].leaving = True
    assert ring._situation() == (set(), set()), "a leaving machine is removed at once"
