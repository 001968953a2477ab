"""The decisions of a deployment, from events and the time: no host, no wait."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from serving.modes.frontier import LatencyModel
from serving.router.active_release import ActiveRelease
from serving.router.host_link import HostLink
from serving.router.ring import Ring, RingView
from serving.router.rollout_state import DRAIN_S, RETRY_S, ROLLOUT_STATES, STORE_TRIES, Delivery, RolloutState
from serving.router.topology import HostEntry
from stages.host.plan import weights_of
from stages.v1 import stage_pb2
from stages.wire.status import Code, StatusError, unavailable
from tests.conftest import refused


def release(name: str) -> stage_pb2.Release:
    return stage_pb2.Release(name=name, ar=stage_pb2.ModelInfo(digest=name, parts=1))


def link_to(name: str, *held: str) -> HostLink:
    """A host without a problem that holds these releases."""
    relay: Any = SimpleNamespace(rtt_ms=1.0, min_rtt_ms=1.0)
    link = HostLink(HostEntry(name, name, (0,), name), 1.0, relay=relay)
    link.update(stage_pb2.DescribeResponse(releases=map(release, held)))
    link.problem = ""
    return link


def served(name: str) -> ActiveRelease:
    view = RingView(Ring(), weights_of(release(name)))
    return ActiveRelease(view, {}, {}, LatencyModel(view.rtts_ms), Path(name), name)


def brought_by(links: list[HostLink], served: ActiveRelease) -> None:
    """Have the hosts bring it: nothing was deployed yet."""
    served.view.ring.links, served.name = links, ""
    served.view.unpin()


@pytest.fixture
def state() -> RolloutState:
    return RolloutState(served("old"), "")


def follow(state: RolloutState, *events: str) -> str:
    for event in events:
        state.change(event)
    return state.state


async def test_a_router_starts_with_its_checkpoint_while_hosts_hold_it() -> None:
    """Its own models belong to it."""
    view = RingView(Ring(), weights_of(release("own")), pinned=False)
    for held, found in ((("own", "new"), ("own", False)), (("new",), ("new", True))):
        view.ring.links = [link_to("a", *held)]
        view.unpin()
        assert (view.release, view.replaced) == found


async def test_only_one_deployment_runs_and_it_ends_at_rest(state: RolloutState) -> None:
    for end in ROLLOUT_STATES:
        assert end == "rests" or not {"ends", "fails"}.isdisjoint(ROLLOUT_STATES[end]), "nothing is left in between"
    state.begin("deployment begins")
    with pytest.raises(StatusError, match="another deployment is in progress"):
        state.begin("rollback begins")
    with pytest.raises(KeyError):
        state.change("requests switch")  # nothing was brought yet
    assert follow(state, "files are here", "all hosts have it", "fails") == "undoes"
    assert follow(state, "ends", "rollback begins", "ends") == "rests"
    state.begin("deployment begins")
    assert follow(state, "files are here", "all hosts have it", "it works", "others switch", "fails") == "stays"


async def test_a_failed_deployment_keeps_the_current_release(state: RolloutState) -> None:
    has, lacks, down = link_to("a", "old", "new"), link_to("b", "old"), link_to("c")
    has.problem, down.problem, down.relay.rtt_ms = "a waits for c", "c is down", None
    links = [has, lacks, down]
    state.begin("deployment begins")
    assert not state.offered("old", links, ())
    for without, code, says in (
        ([], Code.UNAVAILABLE, "c is down; fix that, or deploy with --without c"),
        (["d"], Code.INVALID_ARGUMENT, "there is no host 'd' to leave out; the hosts are a, b, c"),
        (["a", "b", "c"], Code.FAILED_PRECONDITION, "without a, b, c no host holds block 0"),
    ):
        with refused(code, says):
            state.offered("new", links, without)
    has.problem = ""
    assert state.offered("new", links, ["c"])
    brought_by(links, state.current)
    state.received("new")
    assert (state.state, state.incoming, state.joining, state.newly_loaded) == ("brings", "new", [has, lacks], [lacks])
    assert (state.was_pinned, state.current.view.pinned, state.current.name) == (False, True, "old")
    assert [state.kept(link) for link in (*links, link_to("d", "a", "b"))] == [["old"], ["old"], [], ["b"]]


async def test_a_switch_keeps_the_previous_release(state: RolloutState) -> None:
    before, after, host = state.current, served("new"), link_to("a", "old", "new")
    assert state.other_release(host) == "another router deployed release new there: deploy it here, too"
    state.begin("deployment begins")
    assert state.other_release(host) == "", "it is this one that brings it"
    follow(state, "files are here", "all hosts have it", "it works")
    brought_by([host], before)
    state.switch(after)
    assert (before.name, before.view.pinned) == ("old", True)
    assert (state.current, state.previous, state.names) == (after, before, ["old", "new"])
    follow(state, "ends", "rollback begins")
    state.switch(before)
    follow(state, "ends")
    assert (state.names, state.other_release(host)) == (["new", "old"], ""), "the rollback left the host out"


async def test_a_deployment_waits_for_requests_of_the_release_it_drops(state: RolloutState) -> None:
    assert state.is_quiet(0.0)
    state.previous, state.previous_name = served("older"), "older"
    state.previous.requests = 2
    assert not state.is_quiet(DRAIN_S - 0.1)
    with pytest.raises(StatusError, match="2 requests still run on release older"):
        state.is_quiet(DRAIN_S)
    state.previous.requests = 0
    assert state.is_quiet(DRAIN_S)


async def test_a_returning_host_gets_the_current_release(state: RolloutState) -> None:
    has, lacks, lost = link_to("a", "old"), link_to("b"), link_to("c")
    lost.relay.rtt_ms = None
    links = [has, lacks, lost]
    assert state.next_updates(links, 100.0) == [lacks]
    assert state.next_updates(links, 1e6) == [], "it is under way"
    assert not state.is_quiet(0.0)
    state.due_at["b"] = 100.0 + RETRY_S  # it failed
    assert state.is_quiet(0.0)
    assert state.next_updates(links, 100.0 + RETRY_S - 0.1) == []
    assert state.next_updates(links, 100.0 + RETRY_S) == [lacks]
    state.begin("deployment begins")
    state.due_at.clear()
    assert state.next_updates(links, 1e6) == [], "it would replace the deployed release"


@pytest.mark.parametrize("code", [Code.NOT_FOUND, Code.FAILED_PRECONDITION])
def test_a_missing_or_damaged_release_is_stored_once(code: Code) -> None:
    delivery = Delivery("loads")
    with pytest.raises(StatusError, match="lost"):
        delivery.refused(unavailable("lost"))
    delivery.refused(StatusError(code, "no"))
    assert delivery.state == "sends"
    delivery.change("stored")
    with pytest.raises(StatusError, match="still no"):
        delivery.refused(StatusError(code, "still no"))
    delivery.change("loaded")
    assert delivery.state == "done"


def test_an_interrupted_transfer_is_resumed() -> None:
    delivery = Delivery("sends")
    with pytest.raises(StatusError, match="not reached"):
        delivery.refused(unavailable("not reached"))  # nothing came there: another try would be no better
    delivery.sent_bytes = 1
    with pytest.raises(StatusError, match="full"):
        delivery.refused(StatusError(Code.RESOURCE_EXHAUSTED, "full"))
    for _ in range(STORE_TRIES - 1):
        delivery.refused(unavailable("cut"))
    assert delivery.state == "sends"
    with pytest.raises(StatusError, match="cut"):
        delivery.refused(unavailable("cut"))
