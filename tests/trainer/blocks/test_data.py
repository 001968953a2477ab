from pathlib import Path

import pytest
import torch

from stages.errors import DataError
from tests.trainer.small import corpus
from trainer.blocks.data import MIN_BYTES, VALID_SHARE, Corpus, load_corpus, precision


def text_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


def test_a_file_is_split_at_its_end(text_file: Path) -> None:
    raw = text_file.read_bytes()
    assert text_of(corpus.train) + text_of(corpus.valid) == raw
    assert len(corpus.valid) == max(int(len(raw) * VALID_SHARE), MIN_BYTES // 2)


def test_the_split_of_a_folder_is_kept(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.txt").write_text(name * 5000)
        (tmp_path / name / "valid.txt").write_text(name.upper() * 100)
    corpus = load_corpus(tmp_path)
    assert text_of(corpus.train) == b"a" * 5000 + b"b" * 5000
    assert text_of(corpus.valid) == b"A" * 100 + b"B" * 100


def test_folders_without_a_split_are_read_in_order(tmp_path: Path) -> None:
    for name in ("2.txt", "1.txt"):
        (tmp_path / name).write_text(name[0] * 5000)
    corpus = load_corpus(tmp_path)
    assert text_of(corpus.train).startswith(b"1" * 5000 + b"\n2")


def test_the_default_text_is_the_documentation_of_python() -> None:
    corpus = load_corpus(None)
    assert corpus.name == "python-docs"
    assert len(corpus.train) > 100_000
    corpus.require(513)


def test_invalid_text_is_refused(tmp_path: Path) -> None:
    folder, latin, short, file = (tmp_path / name for name in ("empty", "latin.txt", "short.txt", "file.txt"))
    folder.mkdir()
    latin.write_bytes(b"x" * 9000 + b"\xff" + b"x" * 9000)
    short.write_text("short")
    file.write_text("x" * 9000)
    for path, message in (
        (tmp_path / "nowhere", "no text at .*: give a file or a folder"),
        (folder, "no .txt file under .*: name its files so, or give one file"),
        (Path("/dev/null"), "/dev/null is neither a file nor a folder"),
        (latin, r"latin.txt is not UTF-8 \(byte 9000\); convert it"),
        (short, "short.txt: 5 bytes of text are too few; give at least 6144"),
        (file / "below", "no text at .*: give a file or a folder"),
    ):
        with pytest.raises(DataError, match=message):
            load_corpus(path)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    one = corpus.batch(1, 5, 4, 33)
    assert one.shape == (4, 33)
    assert one.dtype == torch.int64
    assert torch.equal(one, corpus.batch(1, 5, 4, 33))
    assert not torch.equal(one, corpus.batch(1, 6, 4, 33))
    assert not torch.equal(one, corpus.batch(2, 5, 4, 33))


def test_batches_are_windows_of_the_training_text_and_reach_its_ends() -> None:
    corpus = Corpus("count", torch.arange(40, dtype=torch.uint8), torch.arange(40, dtype=torch.uint8))
    rows = torch.cat([corpus.batch(0, step, 8, 33) for step in range(40)])
    assert torch.equal(rows, rows[:, :1] + torch.arange(33))
    assert set(rows[:, 0].tolist()) == set(range(7)), "from the first byte to the last but one"


@pytest.mark.parametrize(("capability", "dtype"), [("AVX2", torch.float32), ("AVX512", torch.bfloat16)])
def test_bfloat16_is_used_only_if_it_is_fast(
    monkeypatch: pytest.MonkeyPatch, capability: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    with precision(True, "cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    with precision(False, "cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
