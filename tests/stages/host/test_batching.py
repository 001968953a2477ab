"""Continuous batching: a text does not depend on the requests that shared its passes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.host import scheduler as engines
from stages.host.parts import Parts
from stages.host.scheduler import PASS_ROWS
from tests.stages.hops import Make, scores, steps, sweeps
from tests.stages.slow_runner import Paced, alone

prompts = st.one_of(
    st.binary(min_size=1, max_size=40),
    st.sampled_from([127, 128, 129, 256, 300]).map(lambda n: bytes((7 * i) % 251 for i in range(n))),
)
chunks = st.lists(st.integers(1, 40), min_size=1, max_size=3)
hidden_codecs, state_codecs = st.sampled_from(["fp32", "int8"]), st.sampled_from(["fp32", "int8", "int4"])
COMMON = {"prompt": prompts, "seed": st.integers(0, 3), "temperature": st.sampled_from([0.0, 0.8, 2.0])}
sweep_requests = st.fixed_dictionaries({**COMMON, "chunks": chunks, "steps": st.integers(1, 6), "codec": state_codecs})
step_requests = st.fixed_dictionaries({**COMMON, "count": st.integers(1, 8), "codec": hidden_codecs})
score_requests = st.fixed_dictionaries(
    {**COMMON, "chunks": chunks, "count": st.integers(1, 20), "codec": hidden_codecs}
)
draft_lengths = st.lists(st.integers(0, 9), min_size=1, max_size=4)
"""Numbers of draft tokens, over and over."""
wrong_places = st.lists(st.booleans(), min_size=1, max_size=8)
"""True for bytes of the text that are drafted wrong, over and over."""
traffic = st.lists(
    st.tuples(
        st.integers(1, 4),
        st.one_of(
            st.tuples(st.just("sweeps"), sweep_requests),
            st.tuples(st.just("steps"), step_requests),
            st.tuples(st.just("scores"), score_requests),
            st.tuples(st.just("drafts"), st.tuples(step_requests, draft_lengths, wrong_places)),
        ),
    ),
    min_size=3,
    max_size=8,
)


def drafting(text: bytes, lengths: Sequence[int], wrong: Sequence[bool]) -> Callable[[bytes], bytes]:
    """Drafts of `text` that are wrong in places."""

    def draft(so_far: bytes) -> bytes:
        at = len(so_far)
        length = lengths[at % len(lengths)]
        return bytes(byte ^ wrong[i % len(wrong)] for i, byte in enumerate(text[at : at + length], at))

    return draft


def maker(parts: Parts, kind: str, request: Any) -> Make:
    if kind == "sweeps":
        return lambda: sweeps(**request)
    if kind == "steps":
        return lambda: steps(**request)
    if kind == "scores":
        return lambda: scores(**request)
    plain, lengths, wrong = request
    text = alone(parts, steps(**plain))
    return lambda: steps(**plain, draft=drafting(text, lengths, wrong))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests=traffic, most_hops=st.sampled_from([64, 2, 1]), pass_rows=st.sampled_from([1000, PASS_ROWS, 50, 1]))
def test_a_request_in_a_batch_writes_the_text_it_writes_alone(
    whole: Parts, requests: list[Any], most_hops: int, pass_rows: int
) -> None:
    parts = whole
    makers = [(at, maker(parts, kind, request)) for at, (kind, request) in requests]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "PASS_ROWS", pass_rows)
        engine = Paced(parts, most_hops=most_hops)
        for i, (at, make) in enumerate(makers):
            engine.begin(str(i), make(), at)
        together = engine.finish()
    assert engine.refusals == {}
    assert together == {str(i): alone(parts, make()) for i, (_, make) in enumerate(makers)}
