"""The ways of making rounds that a plan compares."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.config import TrainingConfig
from trainer.rounds.settings import CodecName, RoundSettings

COARSE: tuple[CodecName, ...] = ("bf16", "int8", "e3m0")
COPIES: tuple[CodecName, ...] = ("fp32", "int8")

FRAGMENTS = 4
"""Of the variant that streams, where the settings do not say another number."""


@dataclass(frozen=True)
class Variant:
    """One way: its name, and the settings that it stands for."""

    name: str
    config: TrainingConfig


def variants(config: TrainingConfig, as_set: bool) -> list[Variant]:
    """Ways from a step-by-step exchange to fragments in four bits, for the model and the H of `config`.

    :param as_set: whether to begin with the settings as they are.
    """
    base = config.rounds
    plain = replace(
        base,
        outer="nesterov",
        overlap="none",
        codec="fp32",
        down_codec="fp32",
        context_by="copies",
        fragments=1,
        lookahead=False,
    )
    found = [Variant("as set", config)] if as_set else []

    def add(name: str, rounds: RoundSettings) -> None:
        found.append(Variant(name, replace(config, rounds=rounds)))

    add("every step", replace(plain, steps_per_round=1))
    add("whole blocks", replace(plain, outer="mean"))
    add("diloco", plain)
    for codec in COARSE:
        add(codec, _travelling(plain, codec))
    eager = replace(plain, overlap="eager")
    add("eager", eager)
    add("eager e3m0", _travelling(eager, "e3m0"))
    pieces = min(base.fragments if base.fragments > 1 else FRAGMENTS, base.steps_per_round)
    add("fragments", replace(_travelling(eager, "e3m0"), fragments=pieces))
    if base.model == "chain" and config.architecture.context == "chained" and config.architecture.parts > 1:
        add("features", replace(plain, context_by="features"))
    if base.model != "ar" and config.architecture.parts > 1:
        for codec in COPIES:
            found.append(
                Variant(f"lookahead {codec}", ahead(replace(config, rounds=replace(plain, copies_codec=codec))))
            )
    return found


def ahead(config: TrainingConfig) -> TrainingConfig:
    """The same with lookahead: parts that learn from the last head, through frozen copies of those after them."""
    if config.rounds.model == "scorer":
        return replace(config, lookahead=replace(config.lookahead, ahead=True))
    architecture, rounds = replace(config.architecture, context="chained"), replace(config.rounds, lookahead=True)
    return replace(config, architecture=architecture, rounds=rounds)


def _travelling(rounds: RoundSettings, codec: CodecName) -> RoundSettings:
    return replace(rounds, codec=codec, down_codec=codec)
