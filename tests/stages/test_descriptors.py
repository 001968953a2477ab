"""Few log lines when file descriptors run out."""

import logging

from stages.signals import _RateLimitFilter


def test_a_repeated_message_is_logged_once_a_minute() -> None:
    now_s = 0.0
    seldom = _RateLimitFilter(lambda: now_s)

    def is_logged(message: str) -> bool:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, message, (), (OSError, OSError(), None))
        passed = bool(seldom.filter(record))
        assert not passed or ("\n" in message) is (record.exc_info is None)
        return passed

    full = "socket.accept() out of system resource\nsocket: <TransportSocket fd=6>"
    assert [is_logged(full), is_logged(full), is_logged("another"), is_logged("another")] == [True, False, True, True]
    now_s = 60.0
    assert [is_logged(full), is_logged(full)] == [True, False]
