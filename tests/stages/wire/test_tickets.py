"""Tickets survive a chat message or say that they did not; invitations let in whom they should."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stages.errors import InputError
from stages.wire.tickets import MAX_CHARACTERS, PREFIX, Invitations, Ticket

TICKET = Ticket(("203.0.113.5:7790", "[2001:db8::1]:7790"), "ab" * 32, "s3cret-of-a-ticket_0123")
hosts = st.from_regex(r"[a-z][a-z0-9-]{0,9}(\.[a-z0-9-]{1,9}){0,2}", fullmatch=True)
hosts.validate()  # imports now: in a test, Python 3.11.2 may fail to parse beside what ends there


@given(
    st.lists(st.builds("{}:{}".format, hosts, st.integers(1, 65535)), min_size=1, max_size=8),
    st.from_regex("[0-9a-f]{64}", fullmatch=True),
    st.from_regex("[A-Za-z0-9_-]{1,43}", fullmatch=True),
)
def test_a_ticket_is_parsed_as_it_was_written(addresses: list[str], fingerprint: str, secret: str) -> None:
    ticket = Ticket(tuple(addresses), fingerprint, secret)
    assert Ticket.parse(f"  {ticket.text()}\n") == ticket


@given(st.integers(len(PREFIX), len(TICKET.text()) - 1), st.characters(codec="utf-8"))
def test_a_ticket_with_one_changed_letter_is_refused(at: int, letter: str) -> None:
    text = TICKET.text()
    changed = text[:at] + letter + text[at + 1 :]
    if changed[:-1] == text[:-1]:
        return  # the last letter has bits that say nothing
    with pytest.raises(InputError, match="is damaged"):
        Ticket.parse(changed)


@given(st.text(max_size=200))
def test_arbitrary_text_is_not_a_ticket(text: str) -> None:
    for tried in (text, PREFIX + text):
        with pytest.raises(InputError):
            Ticket.parse(tried)


A_PATH = Ticket(TICKET.addresses, "../" * 21 + "x", "s").text()


@pytest.mark.parametrize(
    "text",
    ["onesweep", "hello", PREFIX, PREFIX + "A" * MAX_CHARACTERS, TICKET.text()[:-4], TICKET.text().upper(), A_PATH],
)
def test_an_invalid_ticket_is_refused_with_the_reason(text: str) -> None:
    with pytest.raises(InputError, match=r"damaged|not a ticket"):
        Ticket.parse(text)


def test_an_invitation_expires_after_its_uses_its_date_or_revocation(tmp_path: Path) -> None:
    invitations, now = Invitations(tmp_path / "invitations.json"), time.time()
    made, secret = invitations.add(uses=2, days=1)
    assert secret not in (tmp_path / "invitations.json").read_text()
    for problem in ("", "", "already used"):
        found = invitations.find(secret)
        assert found.problem(now)[16:28] == problem
        invitations.use(found)
    assert "expired on " in made.problem(now + 2 * 86400)
    other, _ = invitations.add(uses=1, days=7, name="paris")
    invitations.revoke(other.id)
    assert [each.problem(now) for each in invitations.all()][1] == "this ticket was revoked"
    assert invitations.find("another") is None
    for uses, days, name in ((0, 1, ""), (1, 0, ""), (1, 1e9, ""), (2, 1, "paris"), (1, float("nan"), "")):
        with pytest.raises(InputError):
            invitations.add(uses, days, name)
    (tmp_path / "invitations.json").write_text(json.dumps([{"id": 1}]))
    with pytest.raises(InputError, match="is damaged"):
        invitations.all()
