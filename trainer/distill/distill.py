"""A distillation from start to finish: the run, its reports, the checkpoint it leaves behind."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stages.checkpoint.checkpoint import file_digest, load_stage, replace_file, save_part, write_manifest
from stages.checkpoint.gate import PROBE_TEXT
from stages.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest
from stages.device import check_device
from stages.errors import CheckpointError, InputError
from stages.model.architecture import WEIGHT_WORDS, Architecture, LlamaArchitecture
from stages.model.pipeline import PipelineStage
from trainer.blocks.checkpoint_dir import RUN_FOLDER
from trainer.blocks.data import Corpus, quick_bfloat16, within_memory
from trainer.blocks.run import Clock, Run, state_path
from trainer.blocks.state import json_digest
from trainer.distill.settings import DistillSettings
from trainer.distill.student import DistillTask, Student, fitting_layers, numbers_in, one_stage
from trainer.distill.teacher import FIRST, Samples, Teacher, held_out, tokens_corpus

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
    corpus = tokens_corpus(s.texts, s.checkpoint, source, s.window)
    origin: dict[str, Any]
    if s.start is None:
        layers = s.layers if s.layers is not None else fitting_layers(source.text_architecture)
        own, origin = one_stage(source.text_architecture, layers), {"layers": list(layers)}
        what = f"the teacher's layers {', '.join(map(str, layers))}"
    else:
        drafter = _started(s, source)
        own, origin, what = drafter.text_architecture, {"start": drafter.digest()}, str(s.start)
    destination = DrafterDir(s.folder, s.checkpoint, _plan(s, own, origin, source, corpus))
    tell(_sentence(what, own, source))
    is_known = destination.open()
    dtype = torch.bfloat16 if s.bfloat16 and quick_bfloat16(s.device) else torch.float32
    teacher = Teacher(s.checkpoint, source, s.device, dtype)
    if s.start is None:
        student = Student.of_layers(teacher, layers)
    else:
        student = Student.started(teacher, load_stage(s.start, 0))
    samples = Samples(teacher, corpus, s, destination.folder / "samples", destination.identity)
    task = DistillTask(student, samples, held_out(teacher, corpus, s.window, s.seed))
    report = _Report(task, destination, s, tell)
    clock = Clock(60 * s.minutes if s.minutes else float("inf"), PUBLISH_EVERY_S, report)
    run = Run(task, s.training(), destination.folder, destination.identity, clock=clock)
    # Without a state nothing was trained yet.
    if not (is_known and state_path(destination.folder, task.name).exists()):
        _begin_run(student, samples, report, run)
    losses = run.train()
    manifest = report.publish(run, losses, finished=True)
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
    settings.check_layers(sum(a.layers_in(index) for index in range(a.parts)))


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


def _plan(
    s: DistillSettings,
    own: Architecture | LlamaArchitecture,
    origin: dict[str, Any],
    teacher: Manifest,
    corpus: Corpus,
) -> Manifest:
    return Manifest(
        kind="ar",
        architecture=own,
        parts=(None,),
        probe_text=teacher.probe_text or PROBE_TEXT,
        tokenizer=teacher.tokenizer,
        data={"name": corpus.name, "train_symbols": len(corpus.train), "train_sha256": corpus.digest()},
        training={"objective": "distilled", "teacher": teacher.digest(), **s.record(), **origin},
        probe_tokens=teacher.probe_tokens,
        files=teacher.files,
    )


def _begin_run(student: Student, samples: Samples, report: _Report, run: Run) -> None:
    first = [samples.sample(index) for index in range(FIRST)]
    tokens, features = (torch.cat(each) for each in zip(*first, strict=True))
    student.begin(tokens, features.to(samples.teacher.device), samples.settings.sequences)
    with torch.inference_mode():
        report(run, report.task.evaluate())


class _Report:
    """Prints the progress of a run and publishes the checkpoint as it is then."""

    def __init__(self, task: DistillTask, destination: DrafterDir, settings: DistillSettings, tell: Tell) -> None:
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


@dataclass(frozen=True)
class DrafterDir:
    """The checkpoint of a drafter: always whole, replaced by a better one after each evaluation."""

    out: Path
    source: Path  # the teacher's checkpoint; its tokenizer and licences are copied
    plan: Manifest  # the manifest without parts and metrics

    @property
    def folder(self) -> Path:
        """The run's state, log and samples."""
        return self.out / RUN_FOLDER

    @property
    def identity(self) -> str:
        """Digest of everything that decides the weights."""
        return json_digest(json.loads(replace(self.plan, metrics={}).to_json()))

    def open(self) -> bool:
        """Make the directory if needed; true if a run can be resumed from it.

        Raises InputError if something else is there, or the drafter is finished.
        """
        known = self.folder.is_dir()
        if (self.out / MANIFEST_NAME).exists():
            there = read_manifest(self.out)
            if (there.training, there.data) != (self.plan.training, self.plan.data):
                raise InputError(f"{self.out} is there already, of another training: name a new directory in --out")
            if there.metrics.get("distilled", {}).get("finished", True):
                raise InputError(f"{self.out} is there already, and finished: name a new directory in --out")
        elif self.out.exists() and (not known or not self.out.is_dir()):
            raise InputError(f"{self.out} is there already: name a new directory in --out")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot distil into {self.out}: {error.strerror}; give another --out") from None
        return known

    def publish(self, stage: PipelineStage, metrics: dict[str, Any]) -> Manifest:
        """Replace the checkpoint atomically by one of these weights."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".new.") as made:
            new = Path(made)
            write_manifest(new, replace(self.plan, metrics={"distilled": metrics}))
            save_part(new, stage)
            manifest = read_manifest(new)
            for name, sha256 in self.plan.files.items():
                if not (self.out / name).exists():
                    replace_file(self.out / name, partial(shutil.copyfile, self.source / name))
                if file_digest(self.out / name) != sha256:
                    raise CheckpointError(f"{self.source / name} is damaged: its SHA-256 is not that of its manifest")
            named = [part.file for part in manifest.parts if part]
            for name in (*named, MANIFEST_NAME):  # last: until it is replaced, readers find the old checkpoint whole
                try:
                    (new / name).replace(self.out / name)
                except OSError as error:
                    raise CheckpointError(f"cannot save {self.out / name}: {error.strerror}; free some space") from None
        for path in self.out.glob("stage-*.safetensors"):
            if path.name not in named:
                path.unlink(missing_ok=True)
        return manifest
