"""Tables and pages of `onesweep bench quality`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from onesweep.loadtest.quality.panel import DERIVED, HUMAN, JUDGED, PANEL, Figure, QualityRow
from onesweep.loadtest.report.page import bullets, html_page, html_pairs, html_table, shown
from onesweep.loadtest.report.table import Column, Estimate, Table, number, number_column

COSTS = (
    number_column("sweeps", "sweeps"),
    number_column("s", "seconds", 3),
    number_column("host-s", "host_seconds", 3),
)


def interval(estimate: Estimate | None, digits: int) -> str:
    """A figure, with its 95 % interval where it has one."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return number(estimate.value if estimate else None, digits)
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def _plain(name: str, figure: Figure) -> Column[QualityRow]:
    return figure.title, lambda row: number(row.figure(name), figure.digits)


def _with_interval(name: str, figure: Figure) -> Column[QualityRow]:
    return figure.title, lambda row: interval(row.figures.get(name), figure.digits)


def _of_panel(
    figures: Iterable[tuple[str, Figure]],
    column: Callable[[str, Figure], Column[QualityRow]],
    costs: Sequence[Column[QualityRow]] = (),
) -> Table[QualityRow]:
    return Table((("mode", lambda row: row.label), *costs, *(column(name, figure) for name, figure in figures)))


def _derived(rows: Sequence[QualityRow]) -> list[tuple[str, Figure]]:
    """The derived figures that a row has."""
    return [(name, figure) for name, figure in DERIVED.items() if any(name in row.figures for row in rows)]


def quality_table(rows: Sequence[QualityRow]) -> str:
    """Figures without their intervals, which the other table has."""
    return _of_panel(PANEL.items(), _plain, COSTS).aligned(rows)


def interval_table(rows: Sequence[QualityRow]) -> str:
    """The judge's figures with their 95 % intervals."""
    return _of_panel([(JUDGED, PANEL[JUDGED]), *_derived(rows)], _with_interval).aligned(rows)


def reasons(rows: Sequence[QualityRow]) -> list[str]:
    """Why figures are missing: a sentence for each reason, with the rows that it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.reasons.items():
            found.setdefault((name, reason), []).append(row.label)
    return [
        f"no {name}{'' if len(who) == len(rows) else ' of ' + ', '.join(who)}: {reason}"
        for (name, reason), who in found.items()
    ]


_SAMPLES_STYLE = """
.texts { display: grid; grid-template-columns: 9rem 1fr; gap: .35rem .9rem; font-size: .85rem; }
.texts dt { font-weight: 600; overflow-wrap: anywhere; } .texts dd { margin: 0; white-space: pre-wrap;
  overflow-wrap: anywhere; font-family: ui-monospace, monospace; } .prompt { opacity: .55; }
"""

_READING = """Every figure is read beside the row <b>human</b>: the true continuations of the same prompts. A judge
alone can be cheated by text that is too even, so low judge bits count only where the entropies beside them are as high
as human ones. In brackets: 95 % intervals over prompts (bootstrap; of the entropies: jackknife)."""


def quality_page(record: dict[str, Any], rows: Sequence[QualityRow]) -> str:
    """The whole page, from the record of a run and its rows."""
    prompts = record["prompts"]
    head = (
        f"<p>{prompts['prompt_bytes']} bytes of prompt, {prompts['bytes']} bytes of text; judge "
        f"{shown(record['judge'])}; {prompts['reference_count']} other passages as the human reference.</p>"
    )
    samples = ["<h2>The first texts, unselected</h2>", *map(_texts, record["samples"])]
    title = f"onesweep: what the text is worth, {prompts['count']} prompts of {prompts['path']}"
    return _page(title, record, [head, *_figures(rows), *samples])


def check_page(record: dict[str, Any], rows: Sequence[QualityRow]) -> str:
    """The whole page of a check."""
    verdicts = [
        [
            shown(name),
            "human" if one["human_wins"] else "<span class='bad'>the cheat</span>",
            shown(one["nearer"]) or "-",
            shown(one["farther"]) or "-",
        ]
        for name, one in record["verdicts"].items()
    ]
    head = (
        "<p>Human text against texts made from it that please single figures: in most figures it must be nearer to "
        "other human text (row <b>reference</b>).</p>"
    )
    table = html_table(["human against", "wins", "nearer in", "farther in"], verdicts, text_columns=4)
    title = f"onesweep: the ruler held against itself, {record['prompts']['path']}"
    return _page(title, record, [head, table, *_figures(rows)])


def _page(title: str, record: dict[str, Any], parts: Sequence[str]) -> str:
    settings = {key: value for key, value in record.items() if key not in ("rows", "samples", "verdicts", "machine")}
    head = [f"<h1>{shown(title)}</h1>", f"<pre>{shown(record['command'])}</pre>"]
    return html_page(
        title, [*head, *parts, "<h2>Settings</h2>", html_pairs(settings | record["machine"])], _SAMPLES_STYLE
    )


def _figures(rows: Sequence[QualityRow]) -> list[str]:
    table = _of_panel([*PANEL.items(), *_derived(rows)], _with_interval, COSTS)
    meanings = {figure.title: figure.meaning for figure in (PANEL | DERIVED).values()}
    return [
        *("<h2>The panel</h2>", f"<p>{_READING}</p>", table.html(rows), bullets(reasons(rows))),
        *("<h2>What the figures mean</h2>", html_pairs(meanings)),
    ]


def _texts(sample: Mapping[str, Any]) -> str:
    entries = {"prompt": "", HUMAN: sample[HUMAN], **sample["texts"]}
    prompt = f'<span class="prompt">{shown(sample["prompt"])}</span>'
    items = "".join(f"<dt>{shown(name)}</dt><dd>{prompt}{shown(text)}</dd>" for name, text in entries.items() if text)
    return f'<figure><dl class="texts">{items}</dl></figure>'
