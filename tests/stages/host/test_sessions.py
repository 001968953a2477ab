"""Sessions: leases, order, and the byte budget."""

from pathlib import Path

import grpc
import pytest

from stages.host.grammar import GRAMMAR_BYTES
from stages.host.parts import Parts, load_parts, session_bytes
from stages.host.plan import plan_host
from stages.host.sessions import REMEMBERED, HostSession, SessionStore
from stages.wire.status import StatusError
from tests.conftest import refused

CAPACITY = 64


@pytest.fixture(scope="module")
def parts(bundles: Path) -> Parts:
    return load_parts(plan_host(bundles / "own", (1, 2)))


class Fixture:
    """A store for two sessions, on a clock that stands still."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.now = parts, 0.0
        self.need = session_bytes(parts.plan.models["chain"].manifest, (0, 1), CAPACITY)
        self.store = SessionStore(2 * self.need, lease_s=10.0)

    def open(self, name: str, kind: str = "chain", capacity: int = CAPACITY) -> HostSession:
        return self.store.open(name, "r", kind, capacity, self.parts, self.now)


@pytest.fixture
def held(parts: Parts) -> Fixture:
    return Fixture(parts)


def test_a_session_takes_the_calculated_memory(held: Fixture) -> None:
    session, of_ar = held.open("a"), held.open("b", "ar")
    tensors = [t for caches in session.caches.values() for cache in caches for t in (cache.keys, cache.values)]
    assert sum(t.numel() * t.element_size() for t in tensors) == held.need == held.store.bytes / 2
    assert list(session.caches) == list(of_ar.caches) == [1, 2]


def test_only_ar_steps_may_go_back_to_before_draft_tokens(held: Fixture) -> None:
    steps, sweeps = held.open("a", "ar"), held.open("b")
    for session in (steps, sweeps):
        session.next_number, session.length = 1, 30
    assert held.store.expected_session("a", "ar", 1, 22) is steps
    for name, kind, start in (("a", "ar", 31), ("b", "chain", 22), ("b", "chain", 31)):
        with refused(grpc.StatusCode.FAILED_PRECONDITION, f"has read 30 positions, but the sweep continues at {start}"):
            held.store.expected_session(name, kind, 1, start)


def test_sessions_over_the_memory_budget_are_refused(held: Fixture) -> None:
    held.open("a")
    held.open("b")
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "no memory for another session: .*raise --session-mb") as caught:
        held.open("c")
    assert caught.value.retry_after_ms == 1000
    assert held.store.release("a")
    held.open("c")


def test_a_schema_counts_once_in_its_session(held: Fixture) -> None:
    held.open("a")
    with pytest.raises(StatusError, match="no memory for another session"):
        held.store.book("a", GRAMMAR_BYTES, held.now)
    assert held.store.bytes == 0
    held.store.budget_bytes += GRAMMAR_BYTES
    held.open("b")
    for _ in range(2):
        held.store.book("b", GRAMMAR_BYTES, held.now)
    assert held.store.bytes == held.need + GRAMMAR_BYTES
    held.store.release("b")
    assert held.store.bytes == 0


def test_a_lease_is_extended_by_renewal_and_by_work_under_way(held: Fixture) -> None:
    renewed, busy, idle = held.open("renewed", capacity=8), held.open("busy", capacity=8), held.open("idle", capacity=8)
    busy.pending = 1
    held.now = 6.0
    held.store.renew(renewed, held.now)
    held.now = 11.0
    held.store.expire(held.now)
    assert list(held.store.sessions) == ["renewed", "busy"]
    assert idle.expires_at == 10.0
    held.now, busy.pending = 16.0, 0
    held.store.expire(held.now)
    assert (held.store.sessions, held.store.bytes) == ({}, 0)


def test_a_late_hop_does_not_reopen_a_released_session(held: Fixture) -> None:
    assert not held.store.release("early")
    with refused(grpc.StatusCode.NOT_FOUND, "was released"):
        held.open("early")
    for i in range(REMEMBERED):
        held.store.release(f"other-{i}")
    held.open("early")


def test_a_repeated_or_early_sweep_is_refused(held: Fixture) -> None:
    session = held.open("a")
    session.next_number, session.length = 2, 30
    assert held.store.expected_session("a", "chain", 2, 30) is session
    cases = [
        (("a", "chain", 1, 30), grpc.StatusCode.ALREADY_EXISTS, "sweep 1 .* was already accepted"),
        (("a", "chain", 3, 30), grpc.StatusCode.FAILED_PRECONDITION, "sweep 3 .* arrived before sweep 2"),
        (("a", "ar", 2, 30), grpc.StatusCode.INVALID_ARGUMENT, "belongs to the chain model, not to ar"),
        (("b", "chain", 2, 30), grpc.StatusCode.NOT_FOUND, "unknown session 'b'.*start the request again"),
    ]
    for arguments, code, says in cases:
        with refused(code, says):
            held.store.expected_session(*arguments)
    with refused(grpc.StatusCode.ALREADY_EXISTS, "already open"):
        held.open("a")
