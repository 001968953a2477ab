"""Ways of making rounds, compared: one setting or two varied, the others equal, over several seeds."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from stages.checkpoint import replace_file
from stages.errors import ConfigError
from trainer.config import TrainingConfig
from trainer.data import Corpus
from trainer.rounds.burden import measure_burden
from trainer.rounds.engine import INPROCESS, engine_named
from trainer.rounds.engine.base import Tally
from trainer.rounds.fleet import Fleet
from trainer.rounds.frame import Frame
from trainer.rounds.shards import PooledCorpus

ONE_PLACE = "one place"
ENGINE = "engine"
NEVER = "never"
"""A sync interval: one merge, at the end."""
TOP = ("sequences", "learning_rate", "matrix_learning_rate", "warmup_steps", "weight_decay")
SECTIONS = ("architecture", "noise", "lookahead")
NOT_DECISIVE = ("log_every", "evaluate_every", "save_every_s")
"""Settings that change no result."""
MAX_ARMS = 1000


@dataclass(frozen=True)
class Arm:
    """One way, by what it differs in; none for the training in one place."""

    varied: tuple[tuple[str, str], ...]
    config: TrainingConfig
    fleet: Fleet
    engine: str = INPROCESS
    pooled: int = 1
    """Replicas whose batches one worker reads together."""

    @property
    def name(self) -> str:
        return ONE_PLACE if self.pooled > 1 else " ".join(f"{key}={value}" for key, value in self.varied) or "rounds"


@dataclass(frozen=True)
class Result:
    """What one arm came to with one seed."""

    arm: str
    seed: int
    losses: dict[str, float]
    """Validation losses in nats; "next_byte" is that of the end."""
    rounds: int
    workers: int
    up_bytes: int
    down_bytes: int
    copies_bytes: int
    updates: dict[str, int]
    busy: float
    """Share of the time in which a worker trained, on average."""
    seconds: float
    """Virtual in process; else real."""
    memory_bytes: int
    held_copies_bytes: int
    step_gflop: float
    """The last three are those of `Burden`."""
    tallies: Sequence[Tally] = ()
    """Of real workers."""
    features_bytes: int = 0
    feeding_gflop: float = 0.0
    """Of `Burden`."""

    @property
    def work(self) -> float:
        """Updates that were merged, as a share of one of each worker in each round."""
        return (self.updates.get("in time", 0) + self.updates.get("late", 0)) / (self.workers * self.rounds)


def arms(
    config: TrainingConfig, fleet: Fleet, varied: Mapping[str, Sequence[str]], one_place: bool = False
) -> list[Arm]:
    """Every combination of the values of `varied`: names, as `_with` has them, to values as text.

    Raises ConfigError for a name that there is not, a value that it does not take, what an engine cannot do.
    """
    found = []
    for values in itertools.product(*varied.values()):
        arm = Arm(tuple(zip(varied, values, strict=True)), config, fleet)
        for name, text in arm.varied:
            arm = _with(arm, name, text)
        engine_named(arm.engine).check(arm.config, arm.fleet)
        found.append(arm)
        if len(found) > MAX_ARMS:
            raise ConfigError(f"more than {MAX_ARMS} ways to compare; vary less")
    if one_place and config.rounds.replicas > 1:
        pooled = config.rounds.replicas
        alone = replace(
            config.rounds, replicas=1, outer="mean", overlap="none", codec="fp32", down_codec="fp32", fragments=1
        )
        sequences = config.sequences * pooled
        found.insert(0, Arm((), replace(config, rounds=alone, sequences=sequences), Fleet(), pooled=pooled))
    return found


def _with(arm: Arm, name: str, text: str) -> Arm:
    """The arm with one thing changed: a name of [rounds], the fleet or TOP, SECTION.NAME, or the engine."""
    config, settings, fleet = arm.config, arm.config.rounds, arm.fleet
    section, dot, key = name.partition(".")
    if name == ENGINE:
        return replace(arm, engine=text)
    if name == "steps_per_round" and text == NEVER:
        return replace(arm, config=replace(config, rounds=replace(settings, steps_per_round=max(config.steps, 1))))
    if name in _names(settings):
        return replace(arm, config=replace(config, rounds=_changed(settings, name, text)))
    if name in _names(fleet):
        return replace(arm, fleet=_changed(fleet, name, text))
    if name in TOP:
        return replace(arm, config=_changed(config, name, text))
    if dot and section in SECTIONS and key in _names(part := getattr(config, section)):
        return replace(arm, config=replace(config, **{section: _changed(part, key, text)}))
    raise ConfigError(
        f"nothing is called {name!r}; vary one of {', '.join((ENGINE, *_names(settings), *_names(fleet), *TOP))}, "
        f"or SECTION.NAME of {', '.join(SECTIONS)}"
    )


def run_arms(arms: Sequence[Arm], seeds: Sequence[int], corpus: Corpus, out: Path) -> Iterator[Result]:
    """Train each arm for each seed, where that is not done yet in `out`, and give results as they come."""
    for arm in arms:
        for seed in seeds:
            yield _run(arm, seed, corpus, out)


def finished(arms: Sequence[Arm], seeds: Sequence[int], corpus: Corpus, out: Path) -> list[Result]:
    """Those results that are there already; trains nothing."""
    found = (_read(_path(arm, seed, out), _identity(arm, seed, corpus)[2]) for arm in arms for seed in seeds)
    return [result for result in found if result is not None]


def _run(arm: Arm, seed: int, corpus: Corpus, out: Path) -> Result:
    frame, read, identity = _identity(arm, seed, corpus)
    path = _path(arm, seed, out)
    if (done := _read(path, identity)) is not None:
        return done
    burden = measure_burden(frame, read)
    trained = engine_named(arm.engine).train(frame, read, replace(arm.fleet, seed=seed))
    traffic = trained.traffic
    result = Result(
        arm=arm.name,
        seed=seed,
        losses=frame.evaluate(trained.weights, read),
        rounds=frame.config.rounds.rounds,
        workers=trained.workers,
        up_bytes=traffic.up_bytes,
        down_bytes=traffic.down_bytes,
        copies_bytes=traffic.copies_bytes,
        updates=dict(traffic.updates),
        busy=traffic.busy_s / (trained.workers * traffic.seconds),
        seconds=traffic.seconds,
        memory_bytes=burden.memory_bytes,
        held_copies_bytes=burden.copies_bytes,
        step_gflop=burden.step_gflop,
        tallies=trained.tallies,
        features_bytes=traffic.features_bytes,
        feeding_gflop=burden.feeding_gflop,
    )
    record = json.loads(json.dumps({"identity": identity, "result": asdict(result)}))
    out.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda temporary: temporary.write_text(json.dumps(record, indent=1), encoding="utf-8"))
    return result


def _identity(arm: Arm, seed: int, corpus: Corpus) -> tuple[Frame, Corpus, dict[str, Any]]:
    """The frame, the text as it is read, and all that decides the result."""
    if arm.pooled > 1:
        corpus = PooledCorpus(corpus.name, corpus.train, corpus.valid, arm.pooled)
    frame = Frame.of(replace(arm.config, seed=seed), corpus)
    fleet = asdict(replace(arm.fleet, seed=seed))
    config = {key: value for key, value in asdict(frame.config).items() if key not in NOT_DECISIVE}
    identity: dict[str, Any] = {"config": config, "data": corpus.digest(), "fleet": fleet}
    identity |= {"pooled": arm.pooled, "engine": arm.engine}
    return frame, corpus, json.loads(json.dumps(identity))


def _path(arm: Arm, seed: int, out: Path) -> Path:
    return out / f"{arm.name.replace(' ', '-').replace('/', '-')}-{seed}.json"


def _read(path: Path, identity: dict[str, Any]) -> Result | None:
    """A result of the same arm, settings and text; None for any other file, which is then written anew."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        before = json.loads(json.dumps({"config": asdict(TrainingConfig()), "fleet": asdict(Fleet())}))
        if _filled(record["identity"], before) != identity:
            return None
        result = record["result"]
        return Result(**{**result, "tallies": [Tally(**tally) for tally in result["tallies"]]})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _filled(record: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """What a setting that came later was before it came: its default."""
    filled = {key: value for key, value in defaults.items() if key not in NOT_DECISIVE} | record
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(filled.get(key), dict):
            filled[key] = _filled(filled[key], default)
    return filled


def _names(settings: object) -> list[str]:
    return [field.name for field in fields(settings) if field.name != "seed"]  # type: ignore[arg-type]


def _changed(settings: Any, name: str, text: str) -> Any:  # noqa: ANN401 - of [rounds] or the fleet
    return replace(settings, **{name: _value(getattr(settings, name), name, text)})


def _value(now: object, name: str, text: str) -> object:
    """Text as what the setting is now. A tuple's numbers are parted by colons."""
    try:
        if isinstance(now, bool):
            return {"true": True, "false": False}[text]
        if isinstance(now, int):
            return int(text)
        if isinstance(now, float):
            return float(text)
        if isinstance(now, tuple):
            return tuple(float(part) for part in text.split(":"))
    except (ValueError, KeyError):
        raise ConfigError(f"{name} does not take {text!r}") from None
    return text
