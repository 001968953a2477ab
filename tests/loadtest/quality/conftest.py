"""Real text that every machine has, and the judge, loaded once."""

from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from loadtest.quality.judge import PACKAGES, LanguageModel, open_judge


@pytest.fixture(scope="session")
def python_docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with valid.txt, cut from Python's own documentation."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "valid.txt").write_text("\n".join(topics[name] for name in sorted(topics)), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> LanguageModel:
    if any(find_spec(package) is None for package in PACKAGES):
        pytest.skip("the judge is not installed (extra `judge`)")
    return open_judge()
