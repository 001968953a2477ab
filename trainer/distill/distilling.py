"""A distillation from beginning to end."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

from stages.errors import InputError
from stages.manifest import Manifest, read_manifest
from stages.probe import PROBE_TEXT
from trainer.data import Corpus
from trainer.distill.destination import Destination
from trainer.distill.pace import draft_ms
from trainer.distill.samples import FIRST, Samples, held_out
from trainer.distill.settings import DistillSettings
from trainer.distill.student import Student, fitting_layers, numbers_in, one_stage
from trainer.distill.task import DistillTask
from trainer.distill.teacher import Teacher
from trainer.distill.text import symbols_corpus
from trainer.rounds.device import check_device, within_memory
from trainer.run import Clock, Run
from trainer.state import state_path

PUBLISH_EVERY_S = 600.0
"""Between two looks at the held-out text, after each of which the checkpoint is replaced."""
Tell = Callable[[str], None]


def distill(settings: DistillSettings, tell: Tell = print) -> Manifest:
    """Make a drafter, or go on with one. Raises OnesweepError with what to do.

    :param tell: gets a line now and then.
    """
    check_device(settings.device)
    teacher = read_manifest(settings.checkpoint)
    _check(settings, teacher)
    with within_memory(settings.device, "give a smaller --window, or fewer --sequences or --layers"):
        return _distilled(settings, teacher, tell)


def _distilled(s: DistillSettings, source: Manifest, tell: Tell) -> Manifest:
    corpus = symbols_corpus(s.texts, s.checkpoint, source, s.window)
    layers = s.layers if s.layers is not None else fitting_layers(source.pipeline_architecture)
    destination = Destination(s.out, s.checkpoint, _plan(s, layers, source, corpus))
    tell(_sizes(source, layers))
    is_known = destination.open()
    dtype = torch.bfloat16 if s.bfloat16 else torch.float32
    teacher = Teacher(s.checkpoint, source, s.device, dtype)
    student = Student(teacher, layers)
    samples = Samples(teacher, corpus, s, destination.folder / "samples", destination.identity)
    task = DistillTask(student, samples, held_out(teacher, corpus, s.window, s.seed))
    report = _Report(task, destination, s, tell)
    clock = Clock(60 * s.minutes if s.minutes else float("inf"), PUBLISH_EVERY_S, report)
    run = Run(task, s.training(), destination.folder, destination.identity, clock=clock)
    if not (is_known and state_path(destination.folder, task.name).exists()):
        _begin(student, samples, report, run)
    losses = run.train()
    manifest = report.publish(run, losses, finished=True)
    run.finish()
    samples.drop()
    return manifest


def _check(settings: DistillSettings, manifest: Manifest) -> None:
    """Whether this pipeline can be distilled so. Raises InputError."""
    if manifest.kind != "ar":
        raise InputError(f"{settings.checkpoint} holds a chain of blocks: a drafter is distilled from an AR pipeline")
    if not manifest.complete:
        raise InputError(f"{settings.checkpoint} is not trained to its end yet: a drafter needs a whole one")
    a = manifest.architecture
    if settings.window > a.positions:
        raise InputError(f"--window {settings.window}: the model reads {a.positions} positions at most")
    total = sum(a.layers_in(index) for index in range(a.parts))
    if settings.layers is not None and not (settings.layers and all(0 <= i < total for i in settings.layers)):
        raise InputError(f"--layers {','.join(map(str, settings.layers))}: the model has layers 0 to {total - 1}")


def _plan(s: DistillSettings, layers: tuple[int, ...], teacher: Manifest, corpus: Corpus) -> Manifest:
    return Manifest(
        kind="ar",
        architecture=one_stage(teacher.pipeline_architecture, len(layers)),
        parts=(None,),
        probe_text=teacher.probe_text or PROBE_TEXT,
        tokenizer=teacher.tokenizer,
        data={"name": corpus.name, "train_symbols": len(corpus.train), "train_sha256": corpus.digest()},
        training={"objective": "distilled", "teacher": teacher.digest(), **s.record(), "layers": list(layers)},
        probe_tokens=teacher.probe_tokens,
        files=teacher.files,
    )


def _sizes(teacher: Manifest, layers: tuple[int, ...]) -> str:
    a = teacher.pipeline_architecture
    own = numbers_in(one_stage(a, len(layers)), 0)
    largest = max(numbers_in(a, index) for index in range(a.parts))
    fits = "no more than" if own <= largest else "MORE than"
    shown = ", ".join(map(str, layers))
    return (
        f"a drafter of the teacher's layers {shown}: {own / 1e6:.1f} million numbers, {fits} the {largest / 1e6:.1f} "
        "million of the largest stage"
    )


def _begin(student: Student, samples: Samples, report: _Report, run: Run) -> None:
    """What a run starts from: the layers as they are, and a lens in closed form."""
    first = [samples.sample(index) for index in range(FIRST)]
    symbols, features = (torch.cat(each) for each in zip(*first, strict=True))
    student.fit_lens(symbols, features.to(student.teacher.device), samples.settings.sequences)
    with torch.inference_mode():
        report(run, report.task.evaluate())


class _Report:
    """Tells how far a run is, and leaves the checkpoint as it then is."""

    def __init__(self, task: DistillTask, destination: Destination, settings: DistillSettings, tell: Tell) -> None:
        self.task, self.destination, self.settings, self.tell = task, destination, settings, tell
        self.noun = destination.plan.tokenizer

    def __call__(self, run: Run, losses: dict[str, float]) -> None:
        self.tell(self._line(run, losses))
        self.publish(run, losses, finished=False)

    def publish(self, run: Run, losses: dict[str, float], finished: bool) -> Manifest:
        s = self.settings
        metrics: dict[str, Any] = {**losses, "steps": run.step, "symbols": run.step * s.sequences * s.window}
        stage = self.task.student.stage_alone()
        metrics |= {"minutes": round(run.spent_s / 60, 1), "finished": finished}
        if finished:
            metrics["draft_ms"] = round(draft_ms(deepcopy(stage)), 2)
        return self.destination.publish(stage, metrics)

    def _line(self, run: Run, losses: dict[str, float]) -> str:
        s = self.settings
        names = {"text": "held-out text", "written": "the model's own text"}
        parts = [
            f"{shown}: KL {losses[f'{name}_kl_bits']:.3f} bits, TV {losses[f'{name}_total_variation']:.3f}, "
            f"{losses[f'{name}_accepted']:.2f} of 8 guesses stand"
            for name, shown in names.items()
        ]
        if run.done:
            parts.append(f"{run.step * s.sequences * s.window / run.spent_s:.0f} {self.noun}/s")
            parts.append(f"{run.spent_s * (1 / run.done - 1) / 60:.0f} min left")
        return f"step {run.step}: {'; '.join(parts)}"
