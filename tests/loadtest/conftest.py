"""A bundle with random weights, small enough to start a deployment of it in seconds."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import Ended, write_bundle
from tests.stages.conftest import one_thread

__all__ = ["one_thread"]


@pytest.fixture(scope="session")
def locust() -> None:
    if find_spec("locust") is None:
        pytest.skip("locust is not installed (extra `loadtest`)")


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """chain/ and ar/ of two parts. Not to be changed."""
    return write_bundle(tmp_path_factory.mktemp("bundle"), seed=0, besides=(), parts=2, context_length=96)


def check_refused(ended: Ended, sentence: str) -> None:
    """A command ended with one line, and printed nothing before it."""
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert ended.err.startswith("onesweep: ")
    assert sentence in ended.err
