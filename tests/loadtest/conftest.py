"""A bundle with random weights, small enough to start a deployment of it in seconds."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from serving.cli.__main__ import main
from tests.conftest import write_bundle
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


def check_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str, code: int = 2) -> None:
    """A command ends with one line, and prints nothing before it."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert err.startswith("onesweep: ")
    assert sentence in err
    assert (err.count("\n"), out) == (1, "")
