"""One training run: a task, its optimizer and its log; resumes after a kill without loss or repetition."""

import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

from stages.errors import ConfigError, Interrupted, ResumeError
from stages.signals import ask_to_stop, on_signal
from stages.wire.secret_files import exclusive
from trainer.blocks.config import RunConfig
from trainer.blocks.data import precision
from trainer.blocks.state import StepLog, load_state, save_state, strip_prefix

BETAS = (0.9, 0.95)
FINAL_LEARNING_RATE = 0.05  # share of the peak rates at the last step


class OptimizerSet:
    """Muon for the layers' matrices and AdamW for embeddings, heads, norms and AdaLN, as Muon's author advises; or
    AdamW for everything."""

    def __init__(self, module: nn.Module, config: RunConfig) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if "layers." in name and "modulation" not in name and p.dim() == 2]
        chosen = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in chosen]
        self.config = config
        self.peaks = (config.matrix_learning_rate, config.learning_rate)
        first: Optimizer
        if config.matrix_optimizer == "muon":
            first = torch.optim.Muon(
                matrices, lr=self.peaks[0], weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        else:
            first = torch.optim.AdamW(matrices, lr=self.peaks[0], betas=BETAS, weight_decay=config.weight_decay)
        self.optimizers = [first, torch.optim.AdamW(rest, lr=self.peaks[1], betas=BETAS, weight_decay=0.0)]

    def step(self, step: int) -> float:
        """Do one update at the rates of `step`; returns their share of the peak rates."""
        share = schedule(step, self.config)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * share
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return share

    def tensors(self) -> dict[str, Tensor]:
        """All state, named by optimizer, parameter and moment."""
        return {
            f"optimizer.{i}.{parameter}.{key}": value if isinstance(value, Tensor) else torch.tensor(float(value))
            for i, optimizer in enumerate(self.optimizers)
            for parameter, state in optimizer.state_dict()["state"].items()
            for key, value in state.items()
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore state that `tensors` returned; the parameters must be the same."""
        for i, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in strip_prefix(f"optimizer.{i}.", tensors).items():
                parameter, key = name.split(".", 1)
                state.setdefault(int(parameter), {})[key] = tensor
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def schedule(step: int, config: RunConfig) -> float:
    """Share of the peak learning rates: a linear warm-up, then a cosine down to 5 % at the last step."""
    warmup = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    decay = FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * 0.5 * (1 + math.cos(math.pi * step / config.steps))
    return warmup * decay


MAX_GRADIENT_NORM = 1.0
MODULE = "module."  # prefix of the weights' names in a state


@dataclass(frozen=True)
class StepLoss:
    """`total` carries the gradient; `parts` (nats) go to the log."""

    # A part that is a tensor is read after the gradient, because reading a number from a GPU waits for it.

    total: Tensor
    parts: Mapping[str, float | Tensor]


class Task(Protocol):
    """A training task. Batches and noise are pure functions of the step, so a run can resume anywhere."""

    @property
    def name(self) -> str: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def trained(self) -> Sequence[nn.Module]:
        """Separately trained parts of the module, each with its own gradient norm."""

    def loss(self, step: int) -> StepLoss: ...

    def evaluate(self) -> dict[str, float]: ...


def state_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.state.safetensors"


class Run:
    """Trains one task in `directory`: NAME.jsonl has a line per log step, NAME.state.safetensors serves to resume."""

    def __init__(self, task: Task, config: RunConfig, directory: Path, identity: str) -> None:
        """:param identity: digest of config and data; a state with another identity is not resumed."""
        self.task, self.config, self.identity = task, config, identity
        directory.mkdir(parents=True, exist_ok=True)
        self.state_path = state_path(directory, task.name)
        self.lock_path = directory / f"{task.name}.lock"
        self.log = StepLog(directory / f"{task.name}.jsonl")
        self.optimizers = OptimizerSet(task.module, config)
        self.step = 0
        self.stop = threading.Event()

    def train(self) -> dict[str, float]:
        """Train to the last step and return the final evaluation.

        Raises Interrupted on SIGINT, SIGTERM or SIGHUP once the state is saved; a second signal does not wait.
        A signal after the last step only sets `stop`.
        """
        problem = f"another process is already training {self.task.name} in {self.log.path.parent}: stop it first"
        with exclusive(self.lock_path, ResumeError(problem)):
            self._resume()
            with on_signal(partial(ask_to_stop, self.stop)):
                return self._loop()

    def finish(self) -> None:
        """Remove the state once the weights are in their checkpoint."""
        self.state_path.unlink(missing_ok=True)

    def _loop(self) -> dict[str, float]:
        saved_at, steps = time.monotonic(), self.config.steps
        # A log file gets a line every half minute, a terminal one a second.
        log_interval_s = 1.0 if sys.stderr.isatty() else 30.0
        with tqdm(total=steps, initial=self.step, desc=self.task.name, unit="step", mininterval=log_interval_s) as bar:
            while self.step < steps:
                record = train_step(self.task, self.optimizers, self.config, self.step)
                now, self.step = time.monotonic(), self.step + 1
                bar.update()
                last = self.step == steps
                evaluate = self.step % self.config.evaluate_every == 0 and not last
                if self.step % self.config.log_every == 0 or evaluate or last:
                    self._log(record | (self._evaluate() if evaluate else {}))
                    shown = {key: f"{value:.3f}" for key, value in record.items() if key.endswith("nats")}
                    bar.set_postfix(shown, refresh=False)
                if last or self.stop.is_set() or now - saved_at > self.config.save_every_s:
                    self._save()
                    saved_at = now
                if self.stop.is_set() and not last:
                    raise Interrupted(f"{self.task.name}: stopped and saved at step {self.step}; run again to resume")
        final = self._evaluate()
        self._log({"final": True, **final})
        return final

    def _evaluate(self) -> dict[str, float]:
        self.task.module.eval()
        with torch.inference_mode():
            return self.task.evaluate()

    def _log(self, record: dict[str, Any]) -> None:
        self.log.append({"step": self.step, "time": round(time.time(), 1), **record})

    def _save(self) -> None:
        # Log first: after a crash in between, steps are repeated, but no finished step lacks its line.
        self.log.flush()
        record = {"step": self.step, "identity": self.identity}
        weights = {MODULE + name: tensor for name, tensor in self.task.module.state_dict().items()}
        save_state(self.state_path, record, weights | self.optimizers.tensors())

    def _resume(self) -> None:
        """Load the saved state, if any, and cut the log back to it."""
        # A kill during a save leaves a temporary file; the state itself is always complete.
        for leftover in self.state_path.parent.glob(f".{self.task.name}.*"):
            leftover.unlink(missing_ok=True)
        if self.state_path.exists():
            record, tensors = load_state(self.state_path)
            if record.get("identity") != self.identity:
                raise ResumeError(
                    f"{self.state_path} belongs to a run with other settings or data; "
                    "resume with the same ones, choose another --out, or delete it to start over"
                )
            try:
                self.task.module.load_state_dict(strip_prefix(MODULE, tensors))
                self.optimizers.restore(tensors)
                self.step = int(record["step"])
            except (KeyError, ValueError, RuntimeError) as error:
                raise ResumeError(f"{self.state_path} is of another run ({error}); delete it to start over") from None
        self.log.cut(self.step)


def train_step(
    task: Task,
    optimizers: OptimizerSet,
    config: RunConfig,
    step: int,
    exchange: Callable[[nn.Module], None] = lambda module: None,
) -> dict[str, Any]:
    """Do one local step; returns the values to log. Raises ConfigError for a gradient that is not finite.

    :param exchange: may change the module's gradients.
    """
    task.module.train()
    device = next(task.module.parameters()).device.type
    with precision(config.bfloat16, device):
        loss = task.loss(step)
    loss.total.backward()
    exchange(task.module)
    # Clip separately trained parts separately: workers with one part each could not know the norm of all.
    norm = max(float(nn.utils.clip_grad_norm_(part.parameters(), MAX_GRADIENT_NORM)) for part in task.trained)
    if not math.isfinite(norm):
        raise ConfigError(
            f"{task.name}: the gradient is {norm} at step {step}; lower learning_rate and "
            "matrix_learning_rate, or set bfloat16 = false"
        )
    parts = {name: value.item() if isinstance(value, Tensor) else value for name, value in loss.parts.items()}
    return {**parts, "gradient_norm": norm, "rate_share": optimizers.step(step)}
