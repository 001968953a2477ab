"""A distillation from beginning to end, in small."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stages import memory
from stages.checkpoint.checkpoint import load_stage
from stages.checkpoint.manifest import TOKENIZER_NAME, Manifest, read_manifest
from stages.errors import Interrupted, OnesweepError
from stages.model.architecture import Architecture
from tests.stages.model.tiny_llama import write_tiny
from tests.trainer.small import corpus, tiny, untrained_ar
from trainer.blocks.run import StepLoss
from trainer.blocks.train import train_blocks
from trainer.distill.distill import distill
from trainer.distill.settings import DistillSettings
from trainer.distill.student import DistillTask
from trainer.distill.teacher import Teacher

Short = Callable[..., DistillSettings]


def told(settings: DistillSettings) -> tuple[Manifest, list[str]]:
    lines = list[str]()
    return distill(settings, lines.append), lines


def test_the_drafter_comes_nearer_and_is_a_checkpoint_like_others(short: Short, pipeline: Path) -> None:
    manifest, lines = told(short(steps=30, learning_rate=3e-3, lens_rate=0.0, window=32, sequences=8))
    first, last = lines[1], manifest.metrics["distilled"]
    assert lines[0].startswith("a drafter from the teacher's layers 0, 1: ")
    assert "held-out text: KL " in first
    assert "of 8 guesses stand" in first
    assert float(first.split("KL ")[1].split()[0]) > 1.03 * last["text_kl_bits"]
    assert (last["steps"], last["symbols"], last["finished"]) == (30, 30 * 8 * 32, True)
    out, source = short().folder, read_manifest(pipeline)
    assert manifest == read_manifest(out)
    assert manifest.files == source.files
    assert (out / TOKENIZER_NAME).read_bytes() == (pipeline / TOKENIZER_NAME).read_bytes()
    assert manifest.architecture == replace(source.architecture, layers=(2,))
    assert manifest.training["teacher"] == source.digest()
    load_stage(out, 0)
    assert sorted(path.name for path in (out / "training").iterdir()) == [
        "distill.jsonl",
        "distill.lock",
    ]


def test_what_is_recorded_is_what_the_stage_does(short: Short, teacher: Teacher, tokens) -> None:
    manifest, _ = told(short(layers=(0, 1, 2, 3)))
    stage = load_stage(short().folder, 0)
    text = tokens.valid_batch(4, 16)
    with torch.no_grad():
        logits = stage.next_byte(stage.read(text)).log_softmax(-1)
    expected = teacher.head.logits(teacher.read(text).flatten(0, 1)).log_softmax(-1).view_as(logits)
    kl = (expected.exp() * (expected - logits)).sum(-1).mean()
    assert manifest.metrics["distilled"]["text_kl_bits"] < 0.01
    assert float(kl) < 0.01


def test_a_drafter_goes_on_from_where_another_run_left_it(short: Short) -> None:
    settings = {"learning_rate": 3e-3, "window": 32, "sequences": 8}
    first, _ = told(short(steps=20, **settings))
    start = short().folder
    going_on = replace(short(steps=20, layers=None, start=start, **settings), out=start.parent / "second")
    second, lines = told(going_on)
    assert lines[0].startswith(f"a drafter from {start}: ")
    assert second.metrics["distilled"]["text_kl_bits"] < first.metrics["distilled"]["text_kl_bits"]
    assert (second.training["start"], second.architecture) == (first.digest(), first.architecture)
    load_stage(going_on.folder, 0)


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(short: Short, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = told(short(steps=6))
    loss, settings = DistillTask.loss, replace(short(steps=6), out=short().folder.parent / "stopped")

    def stopping(self: DistillTask, step: int) -> StepLoss:
        if step == 3:
            raise Interrupted("killed")
        return loss(self, step)

    monkeypatch.setattr(DistillTask, "loss", stopping)
    monkeypatch.setattr(DistillSettings, "training", lambda s: replace(TRAINING(s), save_every_s=0.0))
    with pytest.raises(Interrupted):
        told(settings)
    half = read_manifest(settings.folder)
    assert half.complete, "an early one can be used"
    assert half.metrics["distilled"]["finished"] is False
    monkeypatch.setattr(DistillTask, "loss", loss)
    again, _ = told(settings)
    assert again.parts[0].sha256 == whole.parts[0].sha256
    assert again.metrics["distilled"]["text_kl_bits"] == whole.metrics["distilled"]["text_kl_bits"]


TRAINING = DistillSettings.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": None}, "say how long to train: either --steps or --minutes"),
        ({"steps": -1}, "steps must be a whole number from 0"),
        ({"steps": None, "minutes": 1e9}, "minutes must be a number from 0.001 to 525600"),
        ({"window": 200}, "window 200: the model reads 128 positions at most"),
        ({"written": 1.5}, "written must be a number from 0 to 1"),
        ({"learning_rate": float("nan")}, "learning_rate must be a finite number"),
        ({"layers": (0, 4)}, r"layers = \[0, 4\]: the model has layers 0 to 3"),
        ({"start": Path("local")}, "give either layers or --start"),
        ({"layers": None, "start": Path("nowhere")}, "no checkpoint in nowhere"),
        ({"device": "cuda"}, "there is no device cuda here"),
    ],
)
def test_bad_settings_are_sentences(short: Short, changes: dict, message: str) -> None:
    with pytest.raises(OnesweepError, match=message):
        distill(short(**changes))
    assert not short().folder.exists()


def test_what_cannot_be_distilled_is_a_sentence(
    short: Short, tmp_path: Path, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_blocks(replace(tiny, steps=0), corpus, tmp_path / "chain")
    untrained_ar(tmp_path / "bytes", Architecture(parts=1, layers=1, width=16, heads=2, context_length=64))
    few = tmp_path / "few.txt"
    few.write_text("too little")
    uneven = tmp_path / "uneven"
    uneven.mkdir()
    (uneven / "train.txt").write_text("words " * 1000)
    (uneven / "valid.txt").write_text("word")
    settings = short()
    for bad, message in (
        (replace(settings, checkpoint=tmp_path), "no checkpoint in"),
        (replace(settings, checkpoint=tmp_path / "chain"), "a drafter is distilled from an AR pipeline"),
        (replace(settings, texts=(tmp_path / "none.txt",)), "no text at"),
        (replace(settings, texts=()), "give some text"),
        (replace(settings, texts=(few,)), "are too few"),
        (
            replace(settings, texts=(uneven,)),
            "has 4 tokens, but one window needs 16; .* or a smaller window",
        ),
        (replace(settings, out=few), "cannot train into .*; give another --out"),
        (replace(settings, out=pipeline), "holds a checkpoint of other settings or data; give another --out"),
        (replace(settings, layers=None, start=pipeline), "is no drafter: that is a finished AR pipeline of one stage"),
        (replace(settings, layers=None, start=tmp_path / "bytes"), "has other tokens than"),
    ):
        with pytest.raises(OnesweepError, match=message):
            distill(bad)
    shutil.copytree(pipeline, tmp_path / "damaged")
    (tmp_path / "damaged" / TOKENIZER_NAME).write_text("{}")
    with pytest.raises(OnesweepError, match="does not have its manifest"):
        distill(replace(settings, checkpoint=tmp_path / "damaged"))
    monkeypatch.setattr(memory, "free_memory", lambda: 1)
    with pytest.raises(OnesweepError, match="not enough memory for the model in"):
        distill(settings)


# The command line of a distillation.


def test_a_drafter_is_put_beside_its_model(onesweep: Callable[..., object], tmp_path: Path, text_file: Path) -> None:
    write_tiny(tmp_path)
    config = tmp_path / "distill.toml"
    config.write_text("window = 16\nlayers = [0, 1]\nbfloat16 = false\n")
    words = f"distill --checkpoint {tmp_path} --text {text_file} --steps 1 --config {config} --threads 1"
    done = onesweep(*words.split())
    assert done.code == 0
    assert f"{tmp_path / 'local'}: 128 tokens in 0.0 minutes; on text of the model's own KL " in done.out
    assert read_manifest(tmp_path / "local").training["layers"] == [0, 1]
    again = onesweep(*words.split())
    assert (again.code, again.out) == (2, done.out.splitlines()[0] + "\n")
    assert "is there already, and finished" in again.message
