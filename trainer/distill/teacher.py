"""The pipeline that is distilled, in one process: it reads texts, and writes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from stages.ar import new_caches
from stages.checkpoint import load_stage
from stages.families import PipelineStage
from stages.layers import LayerCache
from stages.manifest import Manifest
from stages.memory import require_memory
from trainer.distill.odds import Head


class Teacher:
    """All stages, frozen, in the type that they compute in."""

    def __init__(self, directory: Path, manifest: Manifest, device: str, dtype: torch.dtype) -> None:
        """Load the stages, one after the other. Raises CheckpointError."""
        sizes = [part.bytes if part else 0 for part in manifest.parts]
        share = 0.5 if dtype == torch.bfloat16 else 1.0
        needed = share * sum(sizes) + max(sizes) if device == "cpu" else max(sizes)
        require_memory(int(needed), f"the model in {directory}")
        self.dtype, self.device = dtype, device
        self.stages: list[PipelineStage] = []
        for index in range(manifest.architecture.parts):
            self.stages.append(load_stage(directory, index).to(device=device, dtype=dtype))

    @property
    def head(self) -> Head:
        head = self.stages[-1].head
        assert head is not None
        return Head(head.weight, head.bias)

    def read(self, symbols: Tensor) -> Tensor:
        """What the head reads at every place. symbols: (rows, positions) int64. Returns (rows, positions, width)."""
        with self._alone():
            return self._features(symbols.to(self.device), None)

    def write(self, prompts: Tensor, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Write on after `prompts` (rows, positions) int64, at temperature 1, until there are `length` symbols.

        Returns the texts (rows, length), and what the head reads at every place of them (rows, length, width).
        """
        generator = torch.Generator(self.device).manual_seed(seed)
        head = self.head
        with self._alone():
            caches = self._caches(length, len(prompts))
            text = prompts.to(self.device)
            features = [self._features(text, caches)]
            while text.shape[1] < length:
                odds = head.logits(features[-1][:, -1]).softmax(-1)
                drawn = torch.multinomial(odds, 1, generator=generator)
                text = torch.cat([text, drawn], dim=1)
                features.append(self._features(drawn, caches))
            return text, torch.cat(features, dim=1)

    def _features(self, symbols: Tensor, caches: list[list[LayerCache]] | None) -> Tensor:
        x = symbols
        for i, stage in enumerate(self.stages):
            x = stage.read(x, caches[i] if caches else None)
        norm = self.stages[-1].norm
        assert norm is not None
        features: Tensor = norm(x)
        return features

    def _caches(self, capacity: int, rows: int) -> list[list[LayerCache]]:
        """Empty ones for every stage, as the stages compute."""
        return [
            [
                LayerCache(cache.keys.to(self.device, self.dtype), cache.values.to(self.device, self.dtype))
                for cache in new_caches(len(stage.layers), stage.architecture, capacity, rows)
            ]
            for stage in self.stages
        ]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Whatever a training step around it has switched on."""
        with torch.no_grad(), torch.autocast(torch.device(self.device).type, enabled=False):
            yield
