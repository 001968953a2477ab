"""Pictures of experts in one process, by the maths of the hosts."""

import hashlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serving.drawing import DEFAULT_GUIDANCE, EXPERT_RULES
from stages.backends import backend_named
from stages.backends.base import PictureRunner
from stages.checkpoint.checkpoint import load_picture_part, load_router_net
from stages.checkpoint.manifest import read_manifest
from stages.model.codec import codec_named
from stages.pictures.experts import Consultation, Turn
from stages.pictures.trajectory import DEFAULT_SOLVER, DrawPlan


@torch.inference_mode()
def pixel_digests(directory: Path, mode: str, levels: int, seed: int, count: int) -> list[str]:
    """SHA-256 of the pixels of each of `count` pictures, drawn as a router's defaults have it.

    Picture i has the seed `seed` + i and the i-th class; after the last class comes the first.
    """
    manifest, maker = read_manifest(directory), backend_named("torch")
    assert manifest.partition is not None
    net, a = load_router_net(directory), manifest.picture_architecture
    runners = [maker.picture(load_picture_part(directory, i)) for i in range(a.parts)] + [maker.picture(net.trunk)]
    digests = []
    for number in range(count):
        plan = DrawPlan(seed + number, (number % len(a.classes),), levels, DEFAULT_SOLVER, DEFAULT_GUIDANCE)
        way = Consultation(net, manifest.partition, plan, EXPERT_RULES[mode], codec_named("int8")).steps(Turn())
        digests.append(hashlib.sha256(_followed(way, runners).numpy().tobytes()).hexdigest())
    return digests


def _followed(way: Generator[Any, Tensor, Tensor], runners: list[PictureRunner]) -> Tensor:
    """Pixels at the end of a way from expert to expert."""
    ask = next(way)
    while True:
        (found,) = runners[ask.expert].evaluate([ask.piece])
        try:
            ask = way.send(found)
        except StopIteration as end:
            return end.value
