"""Optimizers, their schedule, and their state as plain tensors."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.blocks.config import RunConfig

BETAS = (0.9, 0.95)
FINAL_LEARNING_RATE = 0.05  # share of the peak rates that is left at the last step


class OptimizerSet:
    """Muon for the layers' matrices, AdamW for embeddings, heads, norms and AdaLN (as Muon's author advises); or AdamW
    for all."""

    # Six AR layers of width 128 after 250 steps of 2,048 bytes, one seed, bits a byte on validation text: AdamW at 4e-3
    # and 8e-3 3.13; Muon at 1e-2 3.06, at 2e-2 2.90, at 4e-2 2.95.

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

    def step(self, step: int, done: float | None = None) -> float:
        """One update at the rates of `step`; returns the share of the peak rates."""
        share = schedule(step, self.config, done)
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
        """Take state that `tensors` returned; the parameters must be the same."""
        for i, optimizer in enumerate(self.optimizers):
            state: dict[int, dict[str, Tensor]] = {}
            for name, tensor in tensors.items():
                if name.startswith(f"optimizer.{i}."):
                    _, _, parameter, key = name.split(".", 3)
                    state.setdefault(int(parameter), {})[key] = tensor
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def schedule(step: int, config: RunConfig, done: float | None = None) -> float:
    """Share of the peak learning rates: linear warm-up, then a cosine down to 5 % at the last step.

    done: share of the run that is over, if not that of its steps.
    """
    warmup = min(1.0, (step + 1) / max(config.warmup_steps, 1))
    progress = step / max(config.steps, 1) if done is None else done
    decay = FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * 0.5 * (1 + math.cos(math.pi * progress))
    return warmup * decay


def state_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes held by some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
