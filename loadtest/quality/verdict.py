"""Which of two sets of texts is more like human text: figure by figure, and on the panel as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.quality.row import PANEL, QualityRow

_PERFECT = {"auc": 0.5, "mauve": 1.0}
_SAME = 1e-9


@dataclass(frozen=True)
class Verdict:
    """The figures in which one row is nearer to human text than another, and those where it is farther."""

    nearer: tuple[str, ...]
    farther: tuple[str, ...]

    @property
    def wins(self) -> bool:
        """On the panel as a whole: nearer in most of the figures that tell the two apart."""
        return len(self.nearer) > len(self.farther)


def verdict(row: QualityRow, rival: QualityRow, reference: QualityRow) -> Verdict:
    """:param reference: human text other than either's. A figure that one of the three does not have is left out.

    Every figure counts the same, by its distance from the reference: a judge alone prefers a phrase without end, but
    text that is likelier than human text is as far from it as text that is less likely.
    """
    nearer: list[str] = []
    farther: list[str] = []
    for name in PANEL:
        own, others = row.figure(name), rival.figure(name)
        perfect = _PERFECT.get(name, reference.figure(name))
        if own is None or others is None or perfect is None:
            continue
        difference = abs(own - perfect) - abs(others - perfect)
        if abs(difference) > _SAME:
            (nearer if difference < 0 else farther).append(name)
    return Verdict(tuple(nearer), tuple(farther))
