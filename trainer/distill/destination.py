"""The checkpoint that a distillation leaves behind: always whole, better each time that it is replaced."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.checkpoint import file_digest, replace_file, save_stage, write_manifest
from stages.errors import CheckpointError, InputError
from stages.families import PipelineStage
from stages.manifest import MANIFEST_NAME, Manifest, read_manifest
from trainer.destination import RUN_FOLDER


@dataclass(frozen=True)
class Destination:
    """`out`, and what its manifest says beside losses and the weights' digest."""

    out: Path
    source: Path
    """The teacher's checkpoint, whose tokenizer and licences the drafter has too."""
    plan: Manifest
    """Without parts."""

    @property
    def folder(self) -> Path:
        """Where the run keeps its state, its log and its samples."""
        return self.out / RUN_FOLDER

    @property
    def identity(self) -> str:
        """Names the run: everything that decides its weights."""
        record = json.loads(replace(self.plan, metrics={}).to_json())
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()

    def open(self) -> bool:
        """Make the directory if it is not there; whether there is something to go on from.

        Raises InputError where something else is there, or all is done.
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
        """Replace the checkpoint by one of these weights: whoever looks finds the old one, or the new one whole."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".new.") as made:
            new = Path(made)
            write_manifest(new, replace(self.plan, metrics={"distilled": metrics}))
            save_stage(new, stage)
            manifest = read_manifest(new)
            for name in (*manifest.files, *(part.file for part in manifest.parts if part)):
                source = new / name if (new / name).exists() else self.source / name
                self._put(name, source)
            self._put(MANIFEST_NAME, new / MANIFEST_NAME)
        named = {part.file for part in manifest.parts if part}
        for path in self.out.glob("stage-*.safetensors"):
            if path.name not in named:
                path.unlink(missing_ok=True)
        return manifest

    def _put(self, name: str, source: Path) -> None:
        if source.parent == self.source:
            target = self.out / name
            if not target.exists():
                replace_file(target, lambda path: shutil.copyfile(source, path))
            if file_digest(target) != self.plan.files[name]:
                raise CheckpointError(f"{source} is damaged: its SHA-256 is not that of its manifest")
            return
        try:
            source.replace(self.out / name)
        except OSError as error:
            raise CheckpointError(f"cannot save {self.out / name}: {error.strerror}; free some space") from None
