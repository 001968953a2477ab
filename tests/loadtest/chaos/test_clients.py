"""The clients' process as the parent hears it."""

from __future__ import annotations

from loadtest.chaos.answer import Health
from loadtest.chaos.cases import make_cases
from loadtest.chaos.clients import Clients
from loadtest.chaos.crowd import Order


def test_an_old_good_word_says_nothing_of_what_happened_since() -> None:
    order = Order("127.0.0.1:1", (), 1, 1.0)
    clients = Clients(order, lambda command: ["true"])
    clients.wait()
    assert not clients.sound_since(0.0)
    clients.health.append(Health(10.0, {}))
    assert clients.sound_since(9.0)
    assert not clients.sound_since(10.5)
    clients.health.append(Health(11.0, {"a-1": "lost"}))
    assert not clients.sound_since(10.5)
    clients.close()


def test_patience_is_for_as_many_turns_as_an_order_takes() -> None:
    cases = make_cases(["sweep", "ar", "local"], 0, 512)
    assert len(cases) == 9
    assert Order("r", cases, 4, 1.0, once=True).turns == 3
    assert Order("r", cases, 4, 1.0).turns == 1
