from __future__ import annotations

from contextlib import ExitStack

import grpc
import pytest

from stages.refusal import Refusal
from trainer.rounds.streams import MOST, Streams


def test_the_newest_counts_and_too_many_are_refused() -> None:
    streams = Streams()
    with ExitStack() as stack:
        first = stack.enter_context(streams.begin("a"))
        other = stack.enter_context(streams.begin("b"))
        first()
        newest = [stack.enter_context(streams.begin("a")) for _ in range(MOST - 1)][-1]
        newest(), other()
        with pytest.raises(Refusal, match="the same was begun anew") as caught:
            first()
        assert caught.value.code is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(Refusal, match=f"{MOST} calls for the same already"), streams.begin("a"):
            pass
        newest()
    with streams.begin("a") as again:
        again()
