"""One training run: a task, its optimizer, its log; resumable after a kill without loss or repetition."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from stages.checkpoint import replace_file
from stages.errors import Interrupted, ResumeError
from trainer.config import TrainingConfig
from trainer.optimizer import OptimizerSet

MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class StepLoss:
    """`total` carries the gradient; `parts` (nats) go to the log."""

    total: Tensor
    parts: dict[str, float]


class Task(Protocol):
    """What a run trains. Batches and noise are a pure function of the step, so a run can resume anywhere."""

    name: str
    module: nn.Module

    def loss(self, step: int) -> StepLoss: ...

    def evaluate(self) -> dict[str, float]: ...


class Run:
    """Trains one task in `directory`: NAME.jsonl, one line a log step; NAME.state.safetensors, to resume."""

    def __init__(self, task: Task, config: TrainingConfig, directory: Path, identity: str) -> None:
        """:param identity: names config and data; a state of another identity is not resumed."""
        self.task, self.config, self.identity = task, config, identity
        directory.mkdir(parents=True, exist_ok=True)
        self.state_path = directory / f"{task.name}.state.safetensors"
        self.log_path = directory / f"{task.name}.jsonl"
        self.optimizers = OptimizerSet(task.module, config)
        self.step = 0
        self._stop = False

    def train(self) -> dict[str, float]:
        """Train to the last step and return the final evaluation. Raises Interrupted on SIGINT or SIGTERM."""
        self._resume()
        handlers = {number: signal.signal(number, self._ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return self._loop()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def finish(self) -> None:
        """Drop the state once the weights are in their checkpoint."""
        self.state_path.unlink(missing_ok=True)

    def _loop(self) -> dict[str, float]:
        config, saved_at = self.config, time.monotonic()
        with tqdm(total=config.steps, initial=self.step, desc=self.task.name, unit="step", mininterval=1.0) as bar:
            while self.step < config.steps:
                record = self._train_step()
                self.step += 1
                bar.update()
                last = self.step == config.steps
                if self.step % config.log_every == 0 or last:
                    if self.step % config.evaluate_every == 0 and not last:
                        record |= self._evaluate()
                    self._log(record)
                    bar.set_postfix({key: f"{value:.3f}" for key, value in record.items() if key.endswith("nats")})
                if last or self._stop or time.monotonic() - saved_at > config.save_every_s:
                    self._save()
                    saved_at = time.monotonic()
                if self._stop and not last:
                    raise Interrupted(f"{self.task.name}: stopped and saved at step {self.step}; run again to go on")
        final = self._evaluate()
        self._log({"final": True, **final})
        return final

    def _train_step(self) -> dict[str, Any]:
        module = self.task.module.train()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.config.bfloat16):
            loss = self.task.loss(self.step)
        loss.total.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), MAX_GRADIENT_NORM)
        share = self.optimizers.step(self.step)
        return {**loss.parts, "gradient_norm": float(norm), "rate_share": share}

    def _evaluate(self) -> dict[str, float]:
        self.task.module.eval()
        with torch.inference_mode():
            return self.task.evaluate()

    def _log(self, record: dict[str, Any]) -> None:
        with self.log_path.open("a", encoding="utf-8") as log:
            log.write(json.dumps({"step": self.step, "time": round(time.time(), 1), **record}) + "\n")

    def _save(self) -> None:
        tensors = {f"module.{k}": v for k, v in self.task.module.state_dict().items()} | self.optimizers.tensors()
        metadata = {"step": str(self.step), "identity": self.identity}
        replace_file(self.state_path, lambda path: save_file(tensors, path, metadata))

    def _resume(self) -> None:
        """Take the saved state, if any, and cut the log back to it."""
        if not self.state_path.exists():
            self.log_path.unlink(missing_ok=True)
            return
        try:
            with safe_open(self.state_path, framework="pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ResumeError(f"{self.state_path} cannot be read ({error}); delete it to start anew") from None
        if metadata["identity"] != self.identity:
            raise ResumeError(
                f"{self.state_path} belongs to a run with other settings or data; "
                "give the same ones to go on, another --out, or delete it to start anew"
            )
        self.step = int(metadata["step"])
        prefix = "module."
        self.task.module.load_state_dict({k[len(prefix) :]: v for k, v in tensors.items() if k.startswith(prefix)})
        self.optimizers.restore(tensors)
        lines = self.log_path.read_text(encoding="utf-8").splitlines() if self.log_path.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= self.step]
        replace_file(self.log_path, lambda path: path.write_text("".join(line + "\n" for line in kept)))

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop = True
