"""A small model that goes back on what it wrote."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.modes.drafters.local_model import LocalModel, LocalSequence


@pytest.fixture(scope="module")
def local(bundles: Path) -> LocalModel:
    return LocalModel(bundles / "own" / "local")


edits = st.lists(st.tuples(st.integers(0, 60), st.binary(max_size=20), st.integers(0, 12)), min_size=1, max_size=6)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.binary(min_size=1, max_size=160), changes=edits, temperature=st.sampled_from([0.0, 0.8]))
def test_a_sequence_that_goes_back_writes_what_a_new_one_does(
    local: LocalModel, start: bytes, changes: list[tuple[int, bytes, int]], temperature: float
) -> None:
    """Of a text that is cut anywhere and continues otherwise, again and again, as when guesses are wrong."""
    sequence, text = LocalSequence(local, 400, temperature, seed=7), start
    for back, new, count in changes:
        text = text[: max(len(text) - back, 1)] + new
        written, _ = sequence._write(text, count)
        assert len(written) == count
        assert written == LocalSequence(local, 400, temperature, seed=7)._write(text, count)[0]
        text += written
