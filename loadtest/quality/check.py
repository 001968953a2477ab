"""The ruler held against itself: human text must win against text that only pleases some figure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.machine import commit, this_machine
from loadtest.quality.cheats import CHEATS, cheat_texts
from loadtest.quality.panel import Figures
from loadtest.quality.row import HUMAN, QualityRow
from loadtest.quality.run import Ground, Meter, QualitySettings, check_numbers, cut, lay_ground, training_record
from loadtest.quality.verdict import Verdict, verdict
from stages.errors import InputError

REFERENCE = "reference"


@dataclass(frozen=True)
class CheckResult:
    """Rows of the cheats, of one half of the human text and of the other, and how the first half did."""

    settings: QualitySettings
    ground: Ground
    rows: list[QualityRow]
    verdicts: dict[str, Verdict]
    """Of human text against each cheat."""
    command: str

    @property
    def holds(self) -> bool:
        return all(one.wins for one in self.verdicts.values())

    def sentences(self) -> list[str]:
        return [_sentence(name, one) for name, one in self.verdicts.items()]

    def record(self) -> dict[str, Any]:
        s = self.settings
        return {
            "quality": "check",
            "holds": self.holds,
            "command": self.command,
            "commit": commit(),
            "machine": asdict(this_machine()),
            "settings": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(s).items()},
            "judge": self.ground.judge.name,
            "prompts": {"path": str(s.prompts), "sha256": self.ground.prompts.digest(), "count": s.count},
            "training": training_record(self.ground),
            "seed": s.seed,
            "rows": [row.to_record() for row in self.rows],
            "verdicts": {name: asdict(one) | {"human_wins": one.wins} for name, one in self.verdicts.items()},
        }


def run_check(settings: QualitySettings, command: str, meter: Meter) -> CheckResult:
    """Human continuations, and cheats made from them, against other human text. Raises OnesweepError."""
    check_numbers(settings)
    prompts = cut(settings)
    if len(prompts.reference) < settings.count:
        raise InputError(
            f"the check needs text for {2 * settings.count} passages, half of them for comparison; there is room for "
            f"{settings.count + len(prompts.reference)}: give more text, or a smaller --count"
        )
    ground = lay_ground(settings, prompts)
    with meter("judging", (len(CHEATS) + 2) * settings.count) as progress:
        panel = ground.panel(settings.seed, progress)
        reference = _row(REFERENCE, panel.measure(prompts.reference, panel.reference))
        human = _row(HUMAN, panel.measure(prompts.asked, [passage.continuation for passage in prompts.asked]))
        cheats = {
            name: _row(name, panel.measure(prompts.asked, cheat_texts(name, prompts.asked, settings.seed)))
            for name in CHEATS
        }
    verdicts = {name: verdict(human, cheat, reference) for name, cheat in cheats.items()}
    return CheckResult(settings, ground, [*cheats.values(), human, reference], verdicts, command)


def _row(name: str, figures: Figures) -> QualityRow:
    return QualityRow(name, n=len(figures.sizes), figures=figures.values, reasons=figures.reasons)


def _sentence(name: str, one: Verdict) -> str:
    losses = f", farther in {', '.join(one.farther)}" if one.farther else ""
    return (
        f"{'holds' if one.wins else 'FAILS'}: human text against {name}: "
        f"nearer to other human text in {len(one.nearer)} of {len(one.nearer) + len(one.farther)} figures{losses}"
    )
