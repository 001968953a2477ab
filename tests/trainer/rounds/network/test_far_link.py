"""Over a far link a worker is at its coordinator with the first connection that it makes."""

import socket
import time

import grpc
import pytest

from stages.wire.channel import open_blocking_channel

ROUND_TRIPS_S = 0.5
"""Of connecting; longer than gRPC would wait before its second try, and its third."""


@pytest.mark.slow
def test_the_first_connection_is_not_given_up() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        open_blocking_channel(f"127.0.0.1:{listener.getsockname()[1]}") as channel,
    ):
        grpc.channel_ready_future(channel)
        first, _ = listener.accept()
        with first:  # it answers nothing, as if it were far
            time.sleep(ROUND_TRIPS_S)
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                listener.accept()
