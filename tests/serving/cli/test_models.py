"""`onesweep run`: from a file to an answer in one command; a model is imported once."""

import io
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch import Tensor

from serving.cli.models import import_once, is_whole
from serving.client.client import Client
from stages.errors import ServiceError
from stages.progress import ProgressLine
from tests.conftest import Run
from tests.serving.cli.terminal import Terminal
from tests.serving.pretrained import write_model
from tests.stages.importing.published import fitted, write_gguf

pytestmark = pytest.mark.slow

ASKED = ["the sea", "--max-tokens", 6, "--temperature", 0]


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return fitted()


@pytest.fixture(scope="module")
def gguf(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", weights)


class ImportCache:
    """A cache of imports, and its output."""

    def __init__(self, directory: Path) -> None:
        self.directory, self._stream = directory, io.StringIO()

    def checkpoint(self, source: Path, blocks: int = 2) -> Path:
        return import_once(self.directory, source, blocks, None, None, ProgressLine(self._stream))

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def imports(self) -> int:
        return self.text.count(" once, into ")


@pytest.fixture
def import_cache(tmp_path: Path) -> ImportCache:
    return ImportCache(tmp_path / "cache")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "onesweep"


def test_a_file_is_imported_once_and_answers(gguf: Path, cache: Path, onesweep: Run) -> None:
    command = ["run", gguf, *ASKED, "--hosts", 2]
    code, text, err = onesweep(*command)
    assert code == 0, err
    assert text.count("\n") == text[-1:].count("\n") == 1
    assert err.startswith(f"reading {gguf}")
    assert f"importing {gguf} once, into {cache}" in err
    assert "2 hosts ready; router 127.0.0.1:" in err
    (entry,) = (path for path in cache.iterdir() if path.is_dir())
    assert f"tiny.gguf, split into 2 blocks, is in {entry}" in err
    code, again, err = onesweep(*command)
    assert (code, again) == (0, text)
    assert "importing" not in err
    assert onesweep("run", entry, *ASKED)[:2] == (0, text)


def test_hosts_stop_at_the_end_of_a_conversation(gguf: Path, tmp_path: Path, import_cache: ImportCache) -> None:
    checkpoint = import_cache.checkpoint(gguf)
    terminal = Terminal("run", checkpoint, "--max-tokens", 6)
    try:
        terminal.expect("2 hosts ready; router 127.0.0.1:")
        address = "127.0.0.1:" + terminal.expect("\n").strip()
        terminal.expect("> ")
        with Client(address) as client:
            assert client.status().ready
        terminal.type("the sea\n")
        terminal.expect("the sea\n")
        terminal.expect("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
        with Client(address) as client, pytest.raises(ServiceError):
            client.status()
    finally:
        terminal.close()


@pytest.mark.parametrize("harm", ["cut", "flipped", "gone", "manifest"])
def test_a_damaged_entry_is_imported_again(gguf: Path, import_cache: ImportCache, harm: str) -> None:
    entry = import_cache.checkpoint(gguf)
    victim = entry / "manifest.json" if harm == "manifest" else next(entry.glob("stage-1-*.safetensors"))
    content = victim.read_bytes()
    changed = {"cut": content[:-8], "flipped": content[:-1] + bytes([content[-1] ^ 1]), "manifest": b"{"}
    victim.unlink() if harm == "gone" else victim.write_bytes(changed[harm])
    assert not is_whole(entry)
    assert import_cache.checkpoint(gguf) == entry
    assert f"{entry} is damaged: importing {gguf} again" in import_cache.text
    assert victim.read_bytes() == content or harm == "manifest"
    shutil.copytree(entry, entry / "local")
    assert is_whole(entry)
    next((entry / "local").glob("stage-1-*")).unlink()
    assert not is_whole(entry), "a copy beside the model may be damaged, too"


def test_files_of_a_killed_import_are_removed(gguf: Path, import_cache: ImportCache) -> None:
    entry = import_cache.checkpoint(gguf)
    half = entry.parent / f".{entry.name}.abc"
    shutil.copytree(entry, half)
    shutil.rmtree(entry)
    assert import_cache.checkpoint(gguf) == entry
    assert not half.exists()


def test_two_runs_at_once_import_once(gguf: Path, tmp_path: Path) -> None:
    runs = [ImportCache(tmp_path / "cache") for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda run: run.checkpoint(gguf), runs)
    assert one == other
    assert is_whole(one)
    assert sum(run.imports for run in runs) == 1


def test_the_demo_checks_speculation_of_a_pretrained_model(tmp_path: Path, onesweep: Run) -> None:
    write_model(tmp_path / "model")
    code, out, err = onesweep("demo", tmp_path / "model", "--prompt", "the sea")
    assert code == 0, err
    (trips, fewer) = re.findall(r"^ar(?:-speculative)? +\d+ ms +\d+ ms +[\d.]+ +(\d+) ", out, re.MULTILINE)
    assert (trips, int(fewer) <= 96) == ("96", True)
    assert "`ar-speculative` writes the text of `ar`: checked" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["{tmp}/nothing.gguf"], "nothing.gguf does not exist: give a .gguf file, a Hugging Face folder"),
        (["{tmp}"], "is not a model: give a .gguf file"),
        (["{gguf}", " "], "the prompt is empty"),
        (["{gguf}", "x", "--hosts", "0"], "--hosts must be above 0"),
        (["{gguf}", "x", "--blocks", "9"], "--blocks 9: the model has 3 layers"),
        (["{gguf}", "x", "--hosts", "3", "--blocks", "2"], "3 hosts cannot share 2 blocks"),
        (["{gguf}", "x", "--mode", "swep"], "unknown mode 'swep' (did you mean sweep?); choose from"),
        (["{own}", "x", "--context", "9"], "is a checkpoint with its own context: leave out --context"),
        (["{own}", "x", "--blocks", "2"], "has 3 blocks, not 2: import it again"),
    ],
)
def test_a_wrong_argument_is_explained(
    gguf: Path, bundles: Path, tmp_path: Path, onesweep: Run, arguments: list[str], says: str
) -> None:
    places = {"tmp": tmp_path, "gguf": gguf, "own": bundles / "own"}
    code, out, err = onesweep("run", *(a.format(**places) for a in arguments))
    assert (code, out) == (2, "")
    assert says in err


def test_an_import_reports_its_progress_and_the_next_command(gguf: Path, tmp_path: Path, onesweep: Run) -> None:
    code, out, err = onesweep("import", gguf, "--blocks", 2, "--out", tmp_path / "out")
    assert code == 0, err
    lines = err.splitlines()
    assert lines[0] == f"reading {gguf}"
    assert lines[1].startswith("tiny.gguf: 3 layers; this takes 0 MB of disk and 67 MB of memory")
    assert out.splitlines()[-1] == f"chat with it: onesweep run {tmp_path / 'out'}"
    code, out, err = onesweep("import", gguf, "--context", 3, "--out", tmp_path / "short")
    assert out.splitlines()[-1] == "a context of 3 tokens has no room for a chat: import it with a longer --context"
