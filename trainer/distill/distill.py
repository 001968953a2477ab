"""A distillation from start to finish: the run, its reports, the checkpoint it leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stages.checkpoint.checkpoint import load_stage, read_companion, replace_file, save_part
from stages.checkpoint.gate import PROBE_TEXT
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.device import check_device
from stages.errors import InputError
from stages.model.architecture import WEIGHT_WORDS, Architecture, LlamaArchitecture
from trainer.blocks.checkpoint_dir import RUN_FOLDER, add_metrics, identity, open_checkpoint_dir
from trainer.blocks.data import within_memory
from trainer.blocks.run import Run, state_path
from trainer.distill.settings import DistillSettings
from trainer.distill.student import DistillTask, Student, fitting_layers, numbers_in, one_stage
from trainer.distill.teacher import FIRST, Samples, Teacher, tokens_corpus

PUBLISH_EVERY_S = 600.0  # time between two evaluations on held-out text, after each of which the checkpoint is replaced
Tell = Callable[[str], None]


def distill(settings: DistillSettings, tell: Tell = print) -> Manifest:
    """Make a drafter, or continue one; `tell` gets a line of progress now and then. Raises OnesweepError."""
    check_device(settings.device)
    teacher = read_manifest(settings.checkpoint)
    _check(settings, teacher)
    with within_memory(settings.device, "give a smaller window, or fewer sequences or layers"):
        return _distilled(settings, teacher, tell)


def _distilled(s: DistillSettings, source: Manifest, tell: Tell) -> Manifest:
    corpus = tokens_corpus(s.texts, s.checkpoint, s.window)
    origin: dict[str, Any]
    if s.start is None:
        layers = s.layers if s.layers is not None else fitting_layers(source.text_architecture)
        own, origin = one_stage(source.text_architecture, layers), {"layers": list(layers)}
        what = f"the teacher's layers {', '.join(map(str, layers))}"
    else:
        drafter = _started(s, source)
        own, origin, what = drafter.text_architecture, {"start": drafter.digest()}, str(s.start)
    tell(_sentence(what, own, source))
    new = Manifest(
        kind="ar",
        architecture=own,
        parts=(None,),
        probe_text=source.probe_text or PROBE_TEXT,
        tokenizer=source.tokenizer,
        data={"name": corpus.name, "train_symbols": len(corpus.train), "train_sha256": corpus.digest()},
        training={"objective": "distilled", "teacher": source.digest(), **s.record(), **origin},
        probe_tokens=source.probe_tokens,
        files=source.files,
    )
    plan = open_checkpoint_dir(s.folder, new)
    if plan.metrics.get("distilled", {}).get("finished"):
        raise InputError(f"{s.folder} is there already, and finished: name a new directory in --out")
    for name in source.files:
        companion = read_companion(s.checkpoint, source, name)
        replace_file(s.folder / name, partial(Path.write_bytes, data=companion))
    teacher = Teacher(s.checkpoint, s.device, s.bfloat16)
    if s.start is None:
        student = Student.of_layers(teacher, layers)
    else:
        stage = load_stage(s.start, 0).requires_grad_(True)
        student = Student(teacher, stage, stage)  # all its numbers are trained, head and embedding too
    folder = s.folder / RUN_FOLDER
    samples = Samples(teacher, corpus, s, folder / "samples", identity(plan))
    task = DistillTask(student, samples)

    def publish(run: Run, losses: dict[str, float], finished: bool = False) -> Manifest:
        metrics: dict[str, Any] = {**losses, "steps": run.step, "symbols": run.step * s.sequences * s.window}
        metrics |= {"minutes": round(run.spent_s / 60, 1), "finished": finished}
        save_part(s.folder, student.stage_alone())
        return add_metrics(s.folder, {"distilled": metrics})

    def report(run: Run, losses: dict[str, float]) -> None:
        tell(_progress(run, losses, s, source.tokenizer))
        publish(run, losses)

    budget_s = 60 * s.minutes if s.minutes else float("inf")
    run = Run(
        task,
        s.training(),
        folder,
        identity(plan),
        budget_s=budget_s,
        evaluate_every_s=PUBLISH_EVERY_S,
        evaluated=report,
    )
    if not state_path(folder, task.name).exists():  # nothing was trained yet
        first = [samples.sample(index) for index in range(FIRST)]
        tokens, features = (torch.cat(each) for each in zip(*first, strict=True))
        student.begin(tokens, features.to(teacher.device), s.sequences)
        with torch.inference_mode():
            report(run, task.evaluate())
    losses = run.train()
    manifest = publish(run, losses, finished=True)
    run.finish()
    samples.drop()
    return manifest


def _check(settings: DistillSettings, manifest: Manifest) -> None:
    """Raise InputError unless this pipeline can be distilled with these settings."""
    if manifest.kind != "ar":
        raise InputError(f"{settings.checkpoint} holds a chain of blocks: a drafter is distilled from an AR pipeline")
    if not manifest.complete:
        raise InputError(f"{settings.checkpoint} is not trained to its end yet: a drafter needs a whole one")
    a = manifest.text_architecture
    if settings.window > a.positions:
        raise InputError(f"window {settings.window}: the model reads {a.positions} positions at most")
    if isinstance(a, LlamaArchitecture) and (a.logit_softcap is not None or a.experts is not None):
        raise InputError(
            f"{settings.checkpoint} caps its logits or is a mixture of experts: a drafter is not distilled from such"
        )
    if isinstance(a, LlamaArchitecture) and a.weights != "float32":
        raise InputError(
            f"{settings.checkpoint} has {WEIGHT_WORDS[a.weights]}, which cannot be trained: distil from an import of "
            "the same model with --weights float32, the drafter serves both"
        )
    total, layers = sum(a.layers_in(index) for index in range(a.parts)), settings.layers
    if layers is not None and not (layers and all(0 <= i < total for i in layers)):
        raise InputError(f"layers = {list(layers)}: the model has layers 0 to {total - 1}")


def _started(s: DistillSettings, teacher: Manifest) -> Manifest:
    """The drafter of `--start`. Raises OnesweepError where it is none for this teacher."""
    assert s.start is not None
    drafter = read_manifest(s.start)
    if drafter.kind != "ar" or not drafter.complete or drafter.architecture.parts != 1:
        raise InputError(f"--start {s.start} is no drafter: that is a finished AR pipeline of one stage")
    if isinstance(drafter.architecture, LlamaArchitecture) and drafter.architecture.weights != "float32":
        raise InputError(f"--start {s.start}: {WEIGHT_WORDS[drafter.architecture.weights]} cannot be trained")
    vocabularies = [(each.tokenizer, each.files, each.text_architecture.vocabulary) for each in (drafter, teacher)]
    if vocabularies[0] != vocabularies[1]:
        raise InputError(f"--start {s.start} has other tokens than {s.checkpoint}: both need one tokenizer")
    if s.window > drafter.text_architecture.positions:
        raise InputError(
            f"window {s.window}: the drafter reads {drafter.text_architecture.positions} positions at most"
        )
    return drafter


def _sentence(what: str, own: Architecture | LlamaArchitecture, teacher: Manifest) -> str:
    a, numbers = teacher.text_architecture, numbers_in(own, 0)
    largest = max(numbers_in(a, index) for index in range(a.parts))
    fits = "no more than" if numbers <= largest else "MORE than"
    return (
        f"a drafter from {what}: {numbers / 1e6:.1f} million numbers, {fits} the {largest / 1e6:.1f} million of the "
        "largest stage"
    )


def _progress(run: Run, losses: dict[str, float], s: DistillSettings, noun: str) -> str:
    """A line about a run; :param noun: for tokens."""
    names = {"text": "held-out text", "written": "the model's own text"}
    parts = [
        f"{shown}: KL {losses[f'{name}_kl_bits']:.3f} bits, TV {losses[f'{name}_total_variation']:.3f}, "
        f"{losses[f'{name}_accepted']:.2f} of 8 guesses stand"
        for name, shown in names.items()
    ]
    if run.done:
        parts.append(f"{run.step * s.sequences * s.window / run.spent_s:.0f} {noun}/s")
        parts.append(f"{run.spent_s * (1 / run.done - 1) / 60:.0f} min left")
    return f"step {run.step}: {'; '.join(parts)}"
