"""The commands as users type them: their output, and their errors."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stages.checkpoint.manifest import read_manifest

Command = Callable[..., Any]


@pytest.fixture
def given(settings: Callable[..., Path], text_file: Path) -> list[object]:
    return ["--config", settings(), "--data", text_file, "--steps", 2, "--threads", 1]


def test_blocks_ar_and_local_are_trained_and_scored(
    tmp_path: Path, onesweep: Command, given: list[object], text_file: Path
) -> None:
    blocks = onesweep("train", "text", "chain", *given, "--out", tmp_path / "chain")
    assert blocks.code == 0
    assert "2 of 2 blocks trained" in blocks.out
    assert "from_noise_nats" in blocks.out
    ar = onesweep("train", "text", "ar", *given, "--out", tmp_path / "ar")
    assert "2 stages of 1 layer," in ar.out
    local = onesweep("train", "text", "local", *given, "--out", tmp_path / "local")
    assert "1 stage of 1 layer, " in local.out

    flags = ["--data", text_file, "--windows", 2, "--min-context", 8, "--steps", 2]
    table = onesweep("evaluate", tmp_path, *flags)
    assert len(re.findall(r"bits/byte over \d+ bytes", table.out)) == 4 + 1 + 1
    record = json.loads(onesweep("evaluate", tmp_path / "ar", tmp_path / "local", *flags, "--json").out)
    assert [found["kind"] for found in record["checkpoints"]] == ["ar", "ar"]
    (score,) = record["checkpoints"][0]["scores"]
    assert score["name"] == "next byte"
    assert f"{score['bits_per_byte']:8.3f} bits/byte over {score['bytes']} bytes" in table.out


def test_every_option_has_a_default(
    tmp_path: Path, onesweep: Command, settings: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["--config", settings(), "--steps", 1, "--threads", 1]
    assert onesweep("train", "text", "chain", *few).code == 0
    assert onesweep("train", "text", "ar", *few).code == 0
    few[1].write_text(few[1].read_text() + "[rounds]\nreplicas = 3\n")
    assert "[rounds] is ignored" in onesweep("train", "text", "local", *few).message
    for name in ("chain", "ar", "local"):
        assert read_manifest(tmp_path / "runs" / name).data["name"] == "python-docs"
    assert "not trained on the training" not in onesweep("evaluate", "runs", "--windows", 2, "--min-context", 8).out


# Mistakes


FILES = {
    "nan.toml": b"learning_rate = nan\n",
    "key.toml": b"speeed = 1\n",
    "short.txt": b"too short",
    "latin.txt": "naïve ".encode("latin-1") * 3000,
}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("BLOCKS --data nowhere", "no text at nowhere: give a file or a folder"),
        ("BLOCKS --data latin.txt", "latin.txt is not UTF-8"),
        ("AR --data short.txt", "are too few; give at least"),
        ("BLOCKS --config key.toml", "key.toml: unknown setting 'speeed'"),
        ("AR --config nowhere.toml", "cannot read nowhere.toml"),
        ("AR --tokenizer pipe", "pipe is not a regular file"),
        ("AR --steps 0", "--steps must be from 1 to 2"),
        ("BLOCKS --block 2", "this chain has blocks 0 to 1"),
        ("AR --block 0", "--block applies only to a chain: the parts of ar are trained together"),
        ("evaluate . --data TEXT", "no checkpoint in"),
        ("train tokenizer --data TEXT --out latin.txt/tokenizer.json", "cannot write latin.txt/tokenizer.json: "),
        ("train tokenizer --data TEXT --out .", "cannot write .: Is a directory; choose another --out FILE"),
        ("evaluate . --windows 0", "--windows must be at least 1"),
    ],
)
def test_a_mistake_is_explained_in_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    onesweep: Command,
    given: list[object],
    text_file: Path,
    words: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    stand_for: dict[str, list[object]] = {
        "BLOCKS": ["train", "text", "chain", *given, "--out", "out"],
        "AR": ["train", "text", "ar", *given, "--out", "out"],
        "TEXT": [text_file],
    }
    outcome = onesweep(*(each for word in words.split() for each in stand_for.get(word, [word])))
    assert outcome.code == 2
    assert re.search(message, outcome.message)
    assert "\n" not in outcome.message
    assert not (tmp_path / "new").exists()


def test_training_on_a_full_disk_is_an_error_and_can_be_resumed(
    small_disk: Callable[[str], Path], onesweep: Command, given: list[object]
) -> None:
    """A checkpoint with one block, then no room for the second."""
    disk = small_disk("640k")
    words = ["train", "text", "chain", *given, "--out", disk / "chain"]
    assert onesweep(*words, "--block", 0).code == 0
    before = read_manifest(disk / "chain")
    (disk / "filler").write_bytes(b"x" * (shutil.disk_usage(disk).free - 40_000))
    outcome = onesweep(*words)
    assert outcome.code == 1
    assert re.search("cannot (save|write) .*No space left on device", outcome.message)
    assert read_manifest(disk / "chain") == before
    (disk / "filler").unlink()
    assert onesweep(*words).code == 0
    assert read_manifest(disk / "chain").complete
