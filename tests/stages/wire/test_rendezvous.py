"""A router lets machines in, knows who is there, and keeps strangers out."""

import asyncio
import gc
import secrets
import time
import tracemalloc
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stages.v1 import join_pb2
from stages.wire.channel import open_channel
from stages.wire.link_quality import LinkRecord
from stages.wire.links import LinkProxy, MachineLinks, link_address
from stages.wire.messages import PROTOCOL
from stages.wire.rendezvous import Rendezvous, RunDirectory
from stages.wire.status import StatusError
from stages.wire.tls import Security
from stages.wire.tokens import token_metadata
from tests.conftest import PATIENCE_S, eventually
from tests.stages.wire.conftest import reach, running

GUESSES = 10_000


async def test_a_ticket_admits_one_machine_and_a_refusal_gives_the_reason(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        invitations = run.rendezvous.run.invitations
        _, secret = invitations.add(1, 1)

        async def refused(secret: str, name: str, **fields: int) -> str:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await run.enrol(tmp_path / "m", secret, name, **fields)
            return f"{error.value.code().name}: {error.value.details()}"

        assert "clock is 1440 minutes ahead of the router's" in await refused(
            secret, "m", unix_s=int(time.time()) + 86400
        )
        assert (await refused(secret, "m", protocol=PROTOCOL - 1)).startswith("FAILED_PRECONDITION")
        assert "lower-case letters, digits and dashes" in await refused(secret, "../m")
        assert "ALREADY_EXISTS: a machine named router" in await refused(secret, "router")
        joined = await run.enrol(tmp_path / "m", secret, "m")
        assert "UNAUTHENTICATED: this ticket was already used" in await refused(secret, "n")
        assert "the router does not know this ticket" in await refused("guess", "n")
        assert "the router does not know this ticket" in await refused("", "n")
        _, second = invitations.add(1, 1)
        assert "ALREADY_EXISTS: a machine named m" in await refused(second, "m")
        revoked, third = invitations.add(1, 1, "n")
        invitations.revoke(revoked.id)
        assert "this ticket was revoked" in await refused(third, "n")
        # its own secret brings a new certificate, and another start of the router knows it still
        again = Rendezvous(RunDirectory(tmp_path / "run"))
        assert list(again.machines) == ["m"]
        renewed = await run.enrol(tmp_path / "m", joined.secret, "m")
        assert (renewed.secret, renewed.authority) == ("", joined.authority)


async def test_ten_thousand_guessed_tickets_are_refused_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stranger:
        """A call that brings a guess."""

        def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
            return token_metadata(secrets.token_urlsafe(16))

    async with running(tmp_path) as run:
        rendezvous, asked = run.rendezvous, join_pb2.EnrolRequest(name="m", protocol=PROTOCOL)
        _, secret = rendezvous.run.invitations.add(1, 1)
        for number in range(GUESSES):
            if number == GUESSES - 500:
                tracemalloc.start()
            asked.unix_s = int(time.time())
            with pytest.raises(StatusError, match="the router does not know this ticket"):
                await rendezvous.Enrol(asked, Stranger())
        gc.collect()
        kept_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept_bytes < 500 * 64, "nothing of each"
        assert rendezvous.refused == {"Enrol": GUESSES}
        assert (rendezvous.machines, [each.uses for each in rendezvous.run.invitations.all()]) == ({}, [1])
        lines = [line.getMessage() for line in caplog.records if "refused" in line.getMessage()]
        assert (len(lines), lines[-1][:22]) == (14, "Enrol refused, 8192 so")
        assert secret not in caplog.text
        # over the network, and then one who was invited
        outcomes = await asyncio.gather(
            *(run.enrol(tmp_path / f"m{i}", "guess", "m") for i in range(32)), return_exceptions=True
        )
        assert {each.code() for each in outcomes} == {grpc.StatusCode.UNAUTHENTICATED}
        assert (await run.enrol(tmp_path / "m", secret, "m")).name == "m"


async def test_a_leaving_machine_can_still_be_reached(tmp_path: Path) -> None:
    async with running(tmp_path, a=True, b=True) as run:
        run.rendezvous.neighbours = {"a": {"b"}}
        await run.machines["b"].leave()
        assert (run.rendezvous.present, run.rendezvous.leaving) == (["a"], {"b"})
        assert await reach(run.machines["a"].dial, "b", run.machines["a"].tls) == 1
        await eventually(lambda: "link a to b: direct" in run.lines)
        run.rendezvous.kinds["a", "b"] = "relayed"
        await run.machines["a"]._stub.Reach(join_pb2.ReachRequest(to="b", kind="direct"))
        assert run.lines[-1] == "link a to b: direct (it was relayed)"
    assert "b is leaving" in run.lines


async def test_a_removed_machine_is_refused_and_an_absent_rendezvous_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stages.wire.rendezvous.LOOK_S", 0.01)
    async with running(tmp_path, a=True) as run:
        there = run.machines["a"]
        run.rendezvous.kinds["a", "b"], run.rendezvous.budget.carried[frozenset("ab")] = "relayed", 1
        run.rendezvous.run.keep("a", None)
        await eventually(lambda: "a was removed" in run.lines)
        record = LinkRecord.read(run.rendezvous.run.directory)
        assert (record.ports, record.kinds, record.relayed_bytes) == ({}, {}, {})
        links = MachineLinks("a", there.tls, [run.address], there._shown[0][1].split()[1], there.own, tuple)
        with pytest.raises(StatusError, match="this machine has not joined"):
            await links.attend()
        assert "Attend refused" in caplog.text
        with pytest.raises(grpc.aio.AioRpcError, match="code 410"):
            await reach(run.rendezvous.dial, "a", run.rendezvous.run.tls)
        links._rendezvous = "127.0.0.1:1", "127.0.0.1:2"
        attending = asyncio.create_task(links.attend())
        await eventually(lambda: "no rendezvous answers at 127.0.0.1:1, 127.0.0.1:2 (" in caplog.text)
        attending.cancel()
        await links.close()


async def test_a_job_of_another_thread_runs_on_the_rendezvous_s_loop(tmp_path: Path) -> None:
    async def where() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async with running(tmp_path) as run:
        assert await asyncio.to_thread(asyncio.run, run.rendezvous.here(where())) is asyncio.get_running_loop()


async def test_a_second_attendance_ends_the_first_and_unknown_kinds_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path, a=True, b=True) as run:
        run.rendezvous.neighbours = {"a": {"b"}}
        proxy, own = await LinkProxy(run.rendezvous.dial).open(), run.rendezvous.machines["b"]
        async with proxy, open_channel(link_address("b"), security=Security(run.rendezvous.run.tls)) as channel:
            asked = health_pb2.HealthCheckRequest()
            await health_pb2_grpc.HealthStub(channel).Check(asked, timeout=PATIENCE_S)
            assert len(own.pipes) == 1
            run.machines["b"]._addresses = lambda: ("10.77.0.9:7701",)
            own.dismiss()
            await eventually(lambda: not own.pipes and own.addresses == ("10.77.0.9:7701",))
        shown = run.machines["a"]._shown
        channel, stub = run.stub("")
        async with channel:
            first = stub.Attend(join_pb2.AttendRequest(), metadata=shown)
            assert await first.read() == join_pb2.Notice()
            second = stub.Attend(join_pb2.AttendRequest(), metadata=shown)
            assert await second.read() == join_pb2.Notice()
            assert await first.read() == join_pb2.Notice(), "the last"
            assert await first.read() is grpc.aio.EOF
            with pytest.raises(grpc.aio.AioRpcError, match="a link's kind must be one of direct, reversed, relayed"):
                await stub.Reach(join_pb2.ReachRequest(to="b", kind="\x1b]0;"), metadata=shown)
