"""The commands as users type them: what they print, and what a mistake looks like."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.checkpoint.manifest import read_manifest
from stages.errors import InputError
from tests.trainer.processes import ended, launched
from trainer.options import set_threads

Command = Callable[..., Any]


@pytest.fixture
def given(settings: Callable[..., Path], text_file: Path) -> list[object]:
    return ["--config", settings(), "--data", text_file, "--steps", 2, "--threads", 1]


def test_blocks_ar_and_local_are_trained_and_scored(
    tmp_path: Path, onesweep: Command, given: list[object], text_file: Path
) -> None:
    blocks = onesweep("train", "blocks", *given, "--out", tmp_path / "chain")
    assert blocks.code == 0
    assert "2 of 2 blocks trained" in blocks.out
    assert "from_noise_scrambled_nats" in blocks.out
    ar = onesweep("train", "ar", *given, "--out", tmp_path / "ar")
    assert "2 layers in 2 stages" in ar.out
    local = onesweep("train", "ar", *given, "--layers", 1, "--stages", 1, "--out", tmp_path / "local")
    assert "1 layers in 1 stage, " in local.out

    flags = ["--data", text_file, "--windows", 2, "--min-context", 8, "--steps", 2]
    table = onesweep("evaluate", tmp_path, *flags)
    assert len(re.findall(r"bits/byte of \d+ bytes", table.out)) == 8 + 1 + 1
    record = json.loads(onesweep("evaluate", tmp_path / "ar", tmp_path / "local", *flags, "--json").out)
    assert [found["kind"] for found in record["checkpoints"]] == ["ar", "ar"]
    (score,) = record["checkpoints"][0]["scores"]
    assert score["name"] == "next byte"
    assert f"{score['bits_per_byte']:8.3f} bits/byte of {score['bytes']} bytes" in table.out


def test_everything_has_a_default(
    tmp_path: Path, onesweep: Command, settings: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ["--config", settings(), "--steps", 1, "--threads", 1]
    assert onesweep("train", "blocks", *few).code == 0
    assert onesweep("train", "ar", *few).code == 0
    assert onesweep("train", "ar", *few, "--layers", 1, "--stages", 1).code == 0
    for name in ("chain", "ar", "local"):
        assert read_manifest(tmp_path / "runs" / name).data["name"] == "python-docs"
    assert "note: trained on other text" not in onesweep("evaluate", "runs", "--windows", 2, "--min-context", 8).out


def test_one_block_with_a_seed_a_profile_and_a_context(tmp_path: Path, onesweep: Command, given: list[object]) -> None:
    flags = ["--block", 0, "--profile", "blocktrain", "--context", "chained", "--seed", 5]
    assert "1 of 2 blocks trained" in onesweep("train", "blocks", *given, *flags, "--out", tmp_path / "out").out
    manifest = read_manifest(tmp_path / "out")
    assert manifest.architecture.context == "chained"
    assert (manifest.training["profile"], manifest.training["seed"]) == ("blocktrain", 5)


def test_init_prints_the_bytes_of_each_part(tmp_path: Path, onesweep: Command) -> None:
    sizes = ["--parts", 2, "--layers", 1, "--width", 32, "--heads", 2, "--context-bytes", 64]
    outcome = onesweep("init", tmp_path / "chain", *sizes, "--context", "chained")
    for path in (tmp_path / "chain").glob("*.safetensors"):
        assert f"{path.name}  {path.stat().st_size:,} bytes" in outcome.out
    assert "2 parts, " in outcome.out
    assert onesweep("init", tmp_path / "ar", "--kind", "ar", *sizes).code == 0


def test_memory_prints_a_table_or_json(onesweep: Command, given: list[object]) -> None:
    flags = [*given[:4], "--parts", 3, "--layers", 1, "--sequences", 1, "--threads", 1]
    table = onesweep("train", "memory", *flags)
    assert re.search(r"block / end to end = 0\.\d+ \(1/3 = 0\.333\)", table.out)
    record = json.loads(onesweep("train", "memory", *flags, "--json").out)
    block, whole = record["bytes"]["block"]["total"], record["bytes"]["end to end"]["total"]
    assert record["ratios"]["block / end to end"] == pytest.approx(block / whole)


def test_watch_follows_a_real_training(
    tmp_path: Path, onesweep: Command, given: list[object], until: Callable[..., Any], unused_port: int
) -> None:
    address, outcomes = f"127.0.0.1:{unused_port}", list[Any]()
    words = ["train", "ar", *given, "--steps", 60, "--out", tmp_path, "--listen", address]
    process = launched(tmp_path / "words", *words)

    def watched() -> bool:
        outcomes.append(onesweep("train", "watch", address, "--interval", 0.05))
        return outcomes[-1].code == 0 or not process.is_alive()

    until(watched, 60)
    assert ended(process, 60) == 0
    assert outcomes[-1].code == 0
    assert outcomes[-1].out.splitlines()[-1].startswith("ar  step 60/60  finished")


# Mistakes


def words_for(case: str, tmp_path: Path, given: list[object], text_file: Path) -> list[object]:
    config, short, latin, unknown = (tmp_path / name for name in ("nan.toml", "short.txt", "latin.txt", "key.toml"))
    config.write_text("learning_rate = nan\n")
    unknown.write_text("speeed = 1\n")
    short.write_text("too short")
    latin.write_bytes("naïve ".encode("latin-1") * 3000)
    out = ["--out", tmp_path / "out"]
    blocks, ar = ["train", "blocks", *given, *out], ["train", "ar", *given, *out]
    return {
        "missing text": [*blocks, "--data", tmp_path / "nowhere"],
        "not UTF-8": [*blocks, "--data", latin],
        "too little text": [*ar, "--data", short],
        "unknown profile": [*blocks, "--profile", "fast"],
        "unknown key": [*blocks, "--config", unknown],
        "nan rate": [*ar, "--config", config],
        "missing config": [*ar, "--config", tmp_path / "nowhere.toml"],
        "negative steps": [*ar, "--steps", -5],
        "negative seed": [*ar, "--seed", -1],
        "no threads": [*ar, "--threads", 0],
        "block out of range": [*blocks, "--block", 2],
        "chained too early": [*blocks, "--context", "chained", "--block", 1],
        "layers not divisible": [*ar, "--layers", 3, "--stages", 2],
        "open address": [*ar, "--listen", "0.0.0.0:7000"],
        "no address": [*ar, "--listen", "here"],
        "no checkpoint": ["evaluate", tmp_path, "--data", text_file],
        "bad windows": ["evaluate", tmp_path, "--windows", 0],
        "bad width": ["init", tmp_path / "new", "--width", 30, "--heads", 4],
        "bad parts": ["init", tmp_path / "new", "--parts", 0],
        "bad memory sizes": ["train", "memory", "--width", -1],
        "bad watch address": ["train", "watch", "here"],
    }[case]


@pytest.mark.parametrize(
    ("case", "code", "message"),
    [
        ("missing text", 2, "no text at .*nowhere: give a file or a folder"),
        ("not UTF-8", 2, "latin.txt is not UTF-8"),
        ("too little text", 2, "are too few; give at least"),
        ("unknown profile", 2, "unknown profile 'fast'; choose from onesweep, blocktrain"),
        ("unknown key", 2, "key.toml: unknown setting 'speeed'"),
        ("nan rate", 2, "nan.toml: learning_rate must be a finite number"),
        ("missing config", 2, "cannot read .*nowhere.toml"),
        ("negative steps", 2, "steps must be a whole number from 0"),
        ("negative seed", 2, "seed must be a whole number from 0"),
        ("no threads", 2, "--threads must be from 1"),
        ("block out of range", 2, "this chain has blocks 0 to 1"),
        ("chained too early", 2, "train it first"),
        ("layers not divisible", 2, "3 layers cannot be cut into 2 equal stages"),
        ("open address", 2, "has no encryption"),
        ("no address", 2, "must be HOST:PORT"),
        ("no checkpoint", 1, "no checkpoint in"),
        ("bad windows", 2, "windows must be at least 1"),
        ("bad width", 2, "width 30 must be an even multiple of heads 4"),
        ("bad parts", 2, "parts must be a whole number"),
        ("bad memory sizes", 2, "width must be a whole number"),
        ("bad watch address", 2, "must be HOST:PORT"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, onesweep: Command, given: list[object], text_file: Path, case: str, code: int, message: str
) -> None:
    outcome = onesweep(*words_for(case, tmp_path, given, text_file))
    assert outcome.code == code
    assert re.search(message, outcome.message)
    assert "\n" not in outcome.message
    assert not (tmp_path / "new").exists()


def test_another_runs_out_is_refused(tmp_path: Path, onesweep: Command, given: list[object]) -> None:
    assert onesweep("train", "ar", *given, "--out", tmp_path).code == 0
    outcome = onesweep("train", "ar", *given, "--out", tmp_path, "--seed", 8)
    assert outcome.code == 1
    assert "holds a checkpoint of other settings or data; give another --out" in outcome.message


def test_a_damaged_state_is_refused(tmp_path: Path, onesweep: Command, given: list[object]) -> None:
    folder = tmp_path / "out" / "training"
    folder.mkdir(parents=True)
    (folder / "ar.state.safetensors").write_bytes(b"?")
    outcome = onesweep("train", "ar", *given, "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "delete it to start anew" in outcome.message


def test_a_full_disk_is_one_sentence_and_can_be_gone_on_from(
    tmp_path: Path, onesweep: Command, given: list[object]
) -> None:
    """A checkpoint with one block, then no room for the second."""
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", disk]
    made = subprocess.run(mount, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        words = ["train", "blocks", *given, "--out", disk / "chain"]
        assert onesweep(*words, "--block", 0).code == 0
        before = read_manifest(disk / "chain")
        room = shutil.disk_usage(disk).free - 40_000
        (disk / "filler").write_bytes(b"x" * room)
        outcome = onesweep(*words)
        assert outcome.code == 1
        assert re.search("cannot (save|write) .*No space left on device", outcome.message)
        assert read_manifest(disk / "chain") == before
        (disk / "filler").unlink()
        assert onesweep(*words).code == 0
        assert read_manifest(disk / "chain").complete
    finally:
        subprocess.run(["umount", disk], check=True)


def test_the_number_is_set() -> None:
    assert set_threads(2) == 2 == torch.get_num_threads()
    assert set_threads(None) == len(os.sched_getaffinity(0)) == torch.get_num_threads()


@pytest.mark.parametrize("count", [0, -1, 100_000])
def test_a_bad_number_is_refused(count: int) -> None:
    with pytest.raises(InputError, match=f"--threads must be from 1 to 1024, not {count}"):
        set_threads(count)
