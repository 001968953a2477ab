"""`onesweep bench quality --check`: human text must win against texts that are made to please single figures."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice

import numpy as np

from onesweep.loadtest.quality.judge import check_judge, default_judge
from onesweep.loadtest.quality.panel import HUMAN, Comparison, QualityPanel, QualityRow, TextFigures, verdict
from onesweep.loadtest.quality.prompts import Passage
from onesweep.loadtest.quality.run import QualityResult, cut, judge_text, result_of
from onesweep.loadtest.quality.settings import QualitySettings
from onesweep.loadtest.report.table import open_meter
from onesweep.stages.errors import InputError

PHRASE_WORDS = 4  # short enough that a judge knows the next word for sure, as a model does that got stuck


def shuffled_words(passage: Passage, numbers: np.random.Generator) -> bytes:
    """The true continuation with its words, cut at blanks, in another order."""
    words = passage.continuation.split(b" ")
    return b" ".join(words[i] for i in numbers.permutation(len(words)))


def shuffled_bytes(passage: Passage, numbers: np.random.Generator) -> bytes:
    """The true continuation with its characters in another order."""
    text = passage.continuation.decode()
    return "".join(text[i] for i in numbers.permutation(len(text))).encode()


def repeated_phrase(passage: Passage, numbers: np.random.Generator) -> bytes:
    """The first words of the true continuation, again and again."""
    phrase = b" ".join(passage.continuation.split()[:PHRASE_WORDS]) + b" "
    return _repeated(phrase, len(passage.continuation))


def copied_prompt(passage: Passage, numbers: np.random.Generator) -> bytes:
    """The prompt, again and again."""
    return _repeated(passage.prompt, len(passage.continuation))


CHEATS: dict[str, Callable[[Passage, np.random.Generator], bytes]] = {
    "shuffled words": shuffled_words,
    "shuffled bytes": shuffled_bytes,
    "repeated phrase": repeated_phrase,
    "copied prompt": copied_prompt,
}


def cheat_texts(name: str, passages: Sequence[Passage], seed: int) -> list[bytes]:
    """One text for each passage, of the length of its true continuation."""
    numbers = np.random.default_rng(seed)
    return [CHEATS[name](passage, numbers) for passage in passages]


def _repeated(text: bytes, length: int) -> bytes:
    return bytes(islice(cycle(text), length))


REFERENCE = "reference"  # human text that is nobody's: both sides are held against it


@dataclass(frozen=True)
class CheckResult(QualityResult):
    """Rows of the cheats, of one half of the human text and of the other, and how the first half did."""

    verdicts: dict[str, Comparison]  # of human text against each cheat

    @property
    def holds(self) -> bool:
        return all(one.wins for one in self.verdicts.values())

    def sentences(self) -> list[str]:
        return [_sentence(name, one) for name, one in self.verdicts.items()]


def run_check(settings: QualitySettings) -> CheckResult:
    """Human continuations, and cheats made from them, against other human text. Raises OnesweepError."""
    check_judge(settings.judge or default_judge())
    prompts = cut(settings)
    asked, others = prompts.asked, prompts.reference
    if len(others) < settings.count:
        raise InputError(
            f"the check needs text for {2 * settings.count} passages, half of them for comparison; there is room for "
            f"{settings.count + len(others)}: give more text, or a smaller --count"
        )
    judged = judge_text(settings, prompts)
    with open_meter("judging", (len(CHEATS) + 2) * settings.count) as progress:
        panel = QualityPanel(judged, settings.seed, progress)
        reference = _row(REFERENCE, panel.measure(others, panel.reference))
        human = _row(HUMAN, panel.measure(asked, [passage.continuation for passage in asked]))
        cheats = {name: _row(name, panel.measure(asked, cheat_texts(name, asked, settings.seed))) for name in CHEATS}
    verdicts = {name: verdict(human, cheat, reference) for name, cheat in cheats.items()}
    shown = {name: asdict(one) | {"human_wins": one.wins} for name, one in verdicts.items()}
    holds, rows = all(one.wins for one in verdicts.values()), [*cheats.values(), human, reference]
    return CheckResult(
        **vars(result_of("check", settings, judged, rows, holds=holds, verdicts=shown)), verdicts=verdicts
    )


def _row(name: str, figures: TextFigures) -> QualityRow:
    return QualityRow(name, n=len(figures.sizes), figures=figures.values, reasons=figures.reasons)


def _sentence(name: str, one: Comparison) -> str:
    losses = f", farther in {', '.join(one.farther)}" if one.farther else ""
    return (
        f"{'holds' if one.wins else 'FAILS'}: human text against {name}: "
        f"nearer to other human text in {len(one.nearer)} of {len(one.nearer) + len(one.farther)} figures{losses}"
    )
