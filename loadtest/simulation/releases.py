"""The tiny models that schedules serve and deploy, read once, and a loader that takes virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from serving.router.active_release import RouterParts
from stages.backends import Backend
from stages.checkpoint.checkpoint import save_ar, save_part, write_manifest
from stages.checkpoint.gate import PROBE_TEXT
from stages.checkpoint.manifest import Manifest
from stages.checkpoint.release_store import ReleaseManifest, read_release_manifest
from stages.host.drafter import Drafter
from stages.host.loading import Loader
from stages.host.parts import HostPlan, Parts, load_parts, plan_host
from stages.model.architecture import Architecture
from stages.model.block import Block, Codes
from stages.model.partition import NoisePartition
from stages.model.pipeline import ArModel

LOAD_S = 0.3  # virtual time in which a host reads a release
ARCHITECTURE = Architecture(parts=3, layers=1, width=32, heads=2, context_length=512, code_dim=32, condition_dim=16)


@dataclass(frozen=True)
class TinyRelease:
    """A tiny model with random weights: its files, and what hosts and routers have of it in memory."""

    contents: ReleaseManifest
    directory: Path
    backend: Backend
    parts: Sequence[Parts]  # of each host of a ring
    router: RouterParts

    @classmethod
    def made(cls, directory: Path, seed: int) -> TinyRelease:
        """:param directory: for its files."""
        a, generator = ARCHITECTURE, torch.Generator().manual_seed(seed)
        codes, partition = Codes(0, a.code_dim), NoisePartition("uniform", (8.0, 1.5, 0.6, 0.2))
        write_manifest(directory / "chain", Manifest("chain", a, (None,) * a.parts, codes, partition, PROBE_TEXT))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for index in range(a.parts):
                save_part(directory / "chain", _shaken(Block(a, index, codes), generator))
            for name, parts in (("ar", a.parts), ("local", 1)):
                model = _shaken(ArModel(replace(a, parts=parts)), generator)
                manifest = Manifest("ar", model.architecture, (None,) * parts, probe_text=PROBE_TEXT)
                write_manifest(directory / name, manifest)
                save_ar(directory / name, model)
        backend = Backend()
        parts_of = [load_parts(plan_host(directory, (block,)), backend) for block in range(a.parts)]
        contents, router = read_release_manifest(directory), RouterParts.read(directory)
        return cls(contents, directory, backend, parts_of, router)

    def held_by(self, plan: HostPlan) -> Parts:
        """The parts that a host with this plan holds, with a drafter of its own."""
        parts = self.parts[plan.blocks[0]]
        if (drafter := parts.ar_drafter) is not None:  # it learns how long its drafts should be
            parts = replace(parts, ar_drafter=Drafter(drafter.vocabulary, drafter.model))
        return parts


class VirtualLoader(Loader):
    """A loader that takes what is in memory already, in a fixed virtual time."""

    known: Sequence[TinyRelease] = ()

    async def _load_beside(self, plan: HostPlan) -> Parts:
        await asyncio.sleep(LOAD_S)
        return held(self.known, plan)


def held(known: Sequence[TinyRelease], plan: HostPlan) -> Parts:
    """The parts that a host with this plan holds, of whichever release it is."""
    return next(each for each in known if each.parts[plan.blocks[0]].plan.weights == plan.weights).held_by(plan)


def _shaken(module: Any, generator: torch.Generator) -> Any:  # noqa: ANN401 - a Block or an ArModel
    """Weights so large that every byte of the context shows in the output."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return module.eval()
