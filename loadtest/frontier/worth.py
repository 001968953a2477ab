"""The quality of each mode and setting, read from a record of `onesweep bench quality` or from a frontier file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onesweep.loadtest.quality.generation import INFILL, QualityArm, parse_arm
from onesweep.loadtest.quality.panel import AT_HUMAN_ENTROPY, GRAMS, HUMAN, JUDGED, QualityRow
from onesweep.loadtest.quality.prompts import Passage
from onesweep.loadtest.workload.pipeline import Pipeline
from onesweep.loadtest.workload.texts import continued
from onesweep.serving.modes import MODES, SCORERS
from onesweep.serving.modes.frontier import Frontier
from onesweep.serving.modes.tokenizer import tokenizer_of
from onesweep.stages.checkpoint.bundle import find_bundle
from onesweep.stages.checkpoint.manifest import read_manifest
from onesweep.stages.errors import InputError

AUTO = "auto"


@dataclass(frozen=True)
class Worth:
    """One arm's text."""

    arm: QualityArm
    bits: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Ranking:
    """Arms that can be compared."""

    worths: tuple[Worth, ...]
    judge: str
    basis: str  # the ruler's figure that `bits` are
    human_bits: float | None
    weights: Mapping[str, str]  # digests of what was measured
    left_out: tuple[str, ...] = ()  # sentences on rows that are not ranked

    def only(self, arms: Sequence[QualityArm]) -> Ranking:
        """The worths of these arms. Raises InputError for one that was not measured."""
        known = {worth.arm: worth for worth in self.worths}
        chosen = []
        for arm in arms:
            found = [known[arm]] if arm in known else [w for a, w in known.items() if _plain(a) == arm]
            if not found:
                raise InputError(
                    f"--modes {arm.label!r}: what its text is worth was not measured; "
                    f"there are {', '.join(a.label for a in known)}"
                )
            chosen += found
        return replace(self, worths=tuple(dict.fromkeys(chosen)))


def read_ranking(path: Path) -> Ranking:
    """From a file of either kind. Raises InputError that names it."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error}): give what `onesweep bench quality --json` wrote") from None
    try:
        return ranking_of(record)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def ranking_of(record: object) -> Ranking:
    """From the record of `onesweep bench quality`, or of a frontier. Raises InputError."""
    if isinstance(record, dict) and "frontier" in record:
        return _of_frontier(Frontier.from_record(record))
    if not isinstance(record, dict) or record.get("quality") != "run":
        raise InputError("this is no record of `onesweep bench quality --json`, and no frontier")
    try:
        rows = [QualityRow.from_record(row) for row in record["rows"]]
        judge, weights = str(record["judge"]), {str(k): str(v) for k, v in record["weights"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"the record is damaged ({error!r}): measure again with `onesweep bench quality --json`"
        ) from None
    return _of_rows(rows, judge, weights)


def _of_rows(rows: Sequence[QualityRow], judge: str, weights: Mapping[str, str]) -> Ranking:
    human = next((row for row in rows if row.mode == HUMAN), None)
    shown = [row for row in rows if row.mode not in (HUMAN, INFILL, AUTO) and JUDGED in row.figures]
    if not shown:
        raise InputError("no mode in it has judge bits: measure some with `onesweep bench quality --modes ...`")
    arms: dict[QualityArm, list[tuple[QualityArm, QualityRow]]] = {}
    for row in shown:
        arm = arm_of(row)
        arms.setdefault(_plain(arm), []).append((arm, row))
    matched = all(AT_HUMAN_ENTROPY in row.figures for row in shown)
    basis = AT_HUMAN_ENTROPY if matched else JUDGED
    temperature = None if matched else _nearest_temperature(shown, human)
    worths, left_out = [], []
    for plain, group in arms.items():
        same = group if matched or len(group) == 1 else [g for g in group if g[1].temperature == temperature]
        if not same:
            left_out.append(f"{plain.label} has no row at temperature {temperature:g}")
            continue
        arm, row = min(same, key=lambda g: _from_human(g[1], human))
        figure = row.figures[basis]
        worths.append(Worth(arm, figure.value, figure.low, figure.high))
    return Ranking(tuple(worths), judge, basis, human.figure(JUDGED) if human else None, weights, tuple(left_out))


def arm_of(row: QualityRow) -> QualityArm:
    """The arm of a row, with the settings that it turned out to have. Raises InputError."""
    arm = parse_arm(row.spec or row.mode, tuple(MODES))
    return replace(
        arm,
        scorer=arm.scorer or row.scorer or None,
        chunk=arm.chunk or (row.chunk if row.mode == "chunked" else None),
        temperature=row.temperature if arm.temperature is None else arm.temperature,
    )


def _of_frontier(frontier: Frontier) -> Ranking:
    worths = [Worth(parse_arm(o.label, tuple(MODES)), o.bits, o.bits_low, o.bits_high) for o in frontier.options]
    return Ranking(tuple(worths), frontier.judge, frontier.basis, frontier.human_bits, frontier.weights)


def _plain(arm: QualityArm) -> QualityArm:
    """Without its temperature."""
    return replace(arm, temperature=None)


def _nearest_temperature(rows: Sequence[QualityRow], human: QualityRow | None) -> float | None:
    """The temperature at which texts are most nearly as varied as human text."""
    # not the one of the best bits: colder texts please a judge cheaply
    apart: dict[float, list[float]] = {}
    for row in rows:
        if row.temperature is not None:
            apart.setdefault(row.temperature, []).append(_from_human(row, human))
    return min(apart, key=lambda t: sum(apart[t]) / len(apart[t]), default=None)


def _from_human(row: QualityRow, human: QualityRow | None) -> float:
    """Distance of a text's variety from that of human text, bits."""
    own, wanted = row.figure(GRAMS), human.figure(GRAMS) if human else None
    return abs(own - wanted) if own is not None and wanted is not None else 0.0


# Exact bits a byte of human text under the models whose distribution a mode has: no judge, no sampling.


MODELS = ("ar", "scorer", "local")


def exact_bits(checkpoint: Path, passages: Sequence[Passage]) -> dict[str, float]:
    """Bits for a byte of the true continuations after their prompts, by the name of a bundle's folder.

    At temperature 1. A model whose context is too short for a passage is left out. Raises CheckpointError.
    """
    folders = {name: path for name, path in vars(find_bundle(checkpoint)).items() if path and name in MODELS}
    found = {}
    for name, path in folders.items():
        tokenizer = tokenizer_of(path)
        texts = [continued(tokenizer, passage.prompt, passage.continuation) for passage in passages]
        if max(len(before) + len(text) for before, text in texts) <= read_manifest(path).text_architecture.positions:
            pipeline = Pipeline(path)
            nats = sum(pipeline.surprise(before, text) for before, text in texts)
            found[name] = nats / math.log(2) / sum(len(passage.continuation) for passage in passages)
    return found


def model_of(arm: QualityArm) -> str | None:
    """The folder of the model whose distribution the arm's text has; None where none is defined."""
    if arm.mode == "verified":
        return SCORERS.get(arm.scorer or "")
    return {"local": "local", "ar": "ar", "ar-speculative": "ar"}.get(arm.mode)
