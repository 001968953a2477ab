"""What a sampler can do otherwise than the served one: `KEY=VALUE[:KEY=VALUE...]`, such as `noise=fresh:point=byte`."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

from serving.modes.base import DEFAULT_STEPS, DEFAULT_TEMPERATURE
from stages.codec import CODECS
from stages.errors import InputError
from stages.noise import step_sigmas
from stages.partition import NoisePartition

CHOICES = {
    "codec": tuple(CODECS),
    "spacing": ("log", "linear"),
    "noise": ("kept", "ancestral", "fresh"),
    "point": ("mean", "byte", "best"),
    "condition": ("estimate", "point", "twice", "none"),
    "reader": ("chain", "local"),
}
UNCHANGED = "default"
USUAL = (
    "steps=1,steps=2,steps=4,steps=16,steps=32,noise=kept,noise=ancestral,eta=0.8,point=byte,point=best:below=0.4,"
    "condition=none,condition=twice,rounded=yes,temperature=0.6,temperature=1,final=0.5,spacing=linear,start=2,read=0.4,"
    "codec=fp32,chunk=8,chunk=16,chunk=32,chunk=16:keep=8,candidates=8,draft=yes:start=0.4,reader=local:read=1"
)
"""One variable changed at a time, and what needs two."""


@dataclass(frozen=True)
class Variant:
    """One sampler. The defaults are what mode `sweep` does."""

    chunk: int = 0
    """Slots a sweep; 0 = the whole output."""
    keep: int = 0
    """Bytes of a chunk that are kept, the others being denoised again in the next sweep; 0 = all."""
    steps: int = DEFAULT_STEPS
    """Euler steps in each block."""
    spacing: str = "log"
    """How noise levels are spread over a block's range."""
    codec: str = "int8"
    """How the estimate crosses block boundaries."""
    noise: str = "fresh"
    """`kept`: the probability-flow ODE. `ancestral`: DDPM's posterior. `fresh`: new noise at every step."""
    eta: float = 1.0
    """Share of the noise that `ancestral` or `fresh` put in (DDIM's eta, arXiv 2010.02502)."""
    point: str = "mean"
    """A step goes to the `mean` code, to that of a `byte` drawn from the odds, or to that of the `best` byte."""
    below: float = math.inf
    """Noise level under which `point` applies; above it, the mean."""
    sure: float = 0.0
    """`point` applies to slots whose best byte has at least these odds."""
    temperature: float = DEFAULT_TEMPERATURE
    """Of the odds in every evaluation."""
    final: float = math.inf
    """Temperature of the read-out; infinite = as in every evaluation."""
    rounded: bool = False
    """The estimate becomes the nearest code at block boundaries."""
    condition: str = "estimate"
    """What the estimate input gets: the running `estimate`, the last `point`, as in training the block's own first
    guess (`twice` the evaluations), or `none`."""
    read: float = 0.0
    """Noise level at which the text is read out; 0 = sigma_min."""
    reader: str = "chain"
    """Who reads the text out: the `chain`, each slot for itself, or the `local` model byte by byte, with the noisy
    slots as evidence: p(x) exp(z . code / sigma^2)."""
    start: float = 0.0
    """Noise level of the first evaluation; 0 = sigma_max."""
    draft: bool = False
    """The noise is put on a draft of the local model, which the chain then revises (SDEdit, arXiv 2108.01073)."""
    candidates: int = 1
    """Chunks denoised side by side in one sweep; the local model's favourite is kept."""

    @property
    def needs_local(self) -> bool:
        return self.candidates > 1 or self.draft or self.reader == "local"

    @property
    def read_temperature(self) -> float:
        return self.temperature if self.final == math.inf else self.final

    @property
    def evaluations_a_step(self) -> int:
        return 2 if self.condition == "twice" else 1

    def levels(self, partition: NoisePartition) -> list[list[tuple[float, float | None]]]:
        """For each block (sigma, next sigma) of its evaluations; the very last has no next: the text is read there."""
        start, end = self.start or partition.sigma_max, self.read or partition.sigma_min
        each: list[list[tuple[float, float | None]]] = []
        for block in range(len(partition.boundaries) - 1):
            high, low = partition.range(block)
            high, low = min(high, start), max(low, end)
            sigmas = self._spread(high, low) if high > low else []
            each.append([*pairwise(sigmas)])
        last = max(block for block, levels in enumerate(each) if levels)
        each[last].append((end, None))
        return each

    def _spread(self, high: float, low: float) -> list[float]:
        if self.spacing == "log":
            return step_sigmas(high, low, self.steps)
        return [high + (low - high) * i / self.steps for i in range(self.steps)] + [low]


def parse_variant(spec: str, base: Variant) -> Variant:
    """`base` with what `spec` changes. Raises InputError."""
    changes: dict[str, Any] = {}
    for part in () if spec == UNCHANGED else spec.split(":"):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in _KINDS:
            raise InputError(f"{spec!r}: {part!r} is not KEY=VALUE with a key of {', '.join(_KINDS)}")
        if name in CHOICES and value not in CHOICES[name]:
            raise InputError(f"{spec!r}: {name} must be one of {', '.join(CHOICES[name])}, not {value!r}")
        try:
            changes[name] = _KINDS[name](value)
        except (KeyError, ValueError):
            raise InputError(f"{spec!r}: {value!r} is no value for {name}") from None
    variant = replace(base, **changes)
    _check(spec, variant)
    return variant


def parse_variants(text: str, base: Variant) -> dict[str, Variant]:
    """The variants of "V,V" by their specs, the unchanged one first. Raises InputError."""
    specs = [part.strip() for part in text.split(",") if part.strip()]
    return {UNCHANGED: base} | {spec: parse_variant(spec, base) for spec in specs}


_TRUTH = {"yes": True, "no": False}
_KINDS: dict[str, Any] = {
    field.name: {"int": int, "float": float, "str": str, "bool": _TRUTH.__getitem__}[str(field.type)]
    for field in fields(Variant)
}


def _check(spec: str, v: Variant) -> None:
    """Raises InputError for what no sampler can do."""
    least = {"chunk": 0, "keep": 0, "steps": 1, "candidates": 1, "eta": 0, "sure": 0, "read": 0, "start": 0}
    for name, low in least.items():
        if not low <= getattr(v, name) < math.inf:  # false for NaN too
            raise InputError(f"{spec!r}: {name} must be at least {low}")
    if not 0 < v.temperature < math.inf or not v.final >= 0 or not v.below > 0:
        raise InputError(f"{spec!r}: temperatures and noise levels must be positive numbers")
    if v.chunk and v.keep > v.chunk:
        raise InputError(f"{spec!r}: of a chunk of {v.chunk} bytes no {v.keep} can be kept")
    if v.eta > 1 or v.sure > 1:
        raise InputError(f"{spec!r}: eta and sure are shares, at most 1")
