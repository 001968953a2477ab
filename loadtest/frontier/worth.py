"""What the text of each mode and setting is worth: from a record of `onesweep quality`, or from a frontier file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.quality.arm import INFILL, QualityArm, parse_arm
from loadtest.quality.row import AT_HUMAN_ENTROPY, GRAMS, HUMAN, JUDGED, QualityRow
from serving.frontier import Frontier
from serving.modes import MODES
from stages.errors import InputError

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
    basis: str
    """The ruler's figure that `bits` are."""
    human_bits: float | None
    weights: Mapping[str, str]
    """Digests of what was measured."""
    left_out: tuple[str, ...] = ()
    """Sentences on rows that are not ranked."""

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
        raise InputError(f"{path} is not JSON ({error}): give what `onesweep quality --json` wrote") from None
    try:
        return ranking_of(record)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def ranking_of(record: object) -> Ranking:
    """From the record of `onesweep quality`, or of a frontier. Raises InputError."""
    if isinstance(record, dict) and "frontier" in record:
        return _of_frontier(Frontier.from_record(record))
    if not isinstance(record, dict) or record.get("quality") != "run":
        raise InputError("this is no record of `onesweep quality --json`, and no frontier")
    try:
        rows = [QualityRow.from_record(row) for row in record["rows"]]
        judge, weights = str(record["judge"]), {str(k): str(v) for k, v in record["weights"].items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the record is damaged ({error!r}): measure again with `onesweep quality --json`") from None
    return _of_rows(rows, judge, weights)


def _of_rows(rows: Sequence[QualityRow], judge: str, weights: Mapping[str, str]) -> Ranking:
    human = next((row for row in rows if row.mode == HUMAN), None)
    shown = [row for row in rows if row.mode not in (HUMAN, INFILL, AUTO) and JUDGED in row.figures]
    if not shown:
        raise InputError("no mode in it has judge bits: measure some with `onesweep quality --modes ...`")
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
    arm = parse_arm(row.spec or row.mode, MODES)
    return replace(
        arm,
        scorer=arm.scorer or row.scorer or None,
        chunk=arm.chunk or (row.chunk if row.mode == "chunked" else None),
        temperature=row.temperature if arm.temperature is None else arm.temperature,
    )


def _of_frontier(frontier: Frontier) -> Ranking:
    worths = [Worth(parse_arm(o.label, MODES), o.bits, o.bits_low, o.bits_high) for o in frontier.options]
    return Ranking(tuple(worths), frontier.judge, frontier.basis, frontier.human_bits, frontier.weights)


def _plain(arm: QualityArm) -> QualityArm:
    """Without its temperature."""
    return replace(arm, temperature=None)


def _nearest_temperature(rows: Sequence[QualityRow], human: QualityRow | None) -> float | None:
    """Where the texts together are most nearly as varied as human text: colder ones please a judge for little."""
    apart: dict[float, list[float]] = {}
    for row in rows:
        if row.temperature is not None:
            apart.setdefault(row.temperature, []).append(_from_human(row, human))
    return min(apart, key=lambda t: sum(apart[t]) / len(apart[t]), default=None)


def _from_human(row: QualityRow, human: QualityRow | None) -> float:
    """How far a text's variety is from human text's, bits."""
    own, wanted = row.figure(GRAMS), human.figure(GRAMS) if human else None
    return abs(own - wanted) if own is not None and wanted is not None else 0.0


def record_fields(ranking: Ranking) -> dict[str, Any]:
    """What a reader of the figures needs to know of the ranking."""
    return {
        "judge": ranking.judge,
        "basis": ranking.basis,
        "human_bits": ranking.human_bits,
        "weights": dict(ranking.weights),
        "left_out": list(ranking.left_out),
    }
