"""Tables and pages of `onesweep quality` and `bench infill`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.quality.infill import FIGURES as INFILL_FIGURES
from loadtest.quality.infill import InfillRow
from loadtest.quality.panel import AT_HUMAN_ENTROPY, DERIVED, HUMAN, PANEL, QualityRow
from loadtest.report.page import html_page, html_pairs, html_table, shown
from loadtest.report.table import aligned

COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("judge_bits_per_byte", "judge bits", 3),
    ("ngram_bits_per_byte", "n-gram bits", 3),
    ("byte_entropy", "byte ent", 2),
    ("gram_entropy", "4-gram ent", 2),
    ("word_entropy", "word ent", 2),
    ("distinct_2", "distinct-2", 3),
    ("auc", "auc", 3),
    ("mauve", "mauve", 3),
    ("unseen_words", "unseen", 3),
    ("copied_spans", "copied", 3),
)
EXTRA: tuple[tuple[str, str, int], ...] = (
    ("judge_minus_human", "- human", 3),
    ("judge_minus_local", "- local", 3),
    (AT_HUMAN_ENTROPY, "at human entropy", 3),
    ("joined_bits_per_byte", "joined bits", 3),
    ("exact_match", "exact", 3),
)
COSTS: tuple[tuple[str, str, int], ...] = (
    ("sweeps", "sweeps", 1),
    ("seconds", "s", 3),
    ("host_seconds", "host-s", 3),
)


def quality_table(rows: Sequence[QualityRow]) -> str:
    """Figures without their intervals, which the other table has."""
    header = ("mode", *(title for _, title, _ in (*COSTS, *COLUMNS)))
    body = [
        (
            row.spec or row.mode,
            *(number(getattr(row, name), digits) for name, _, digits in COSTS),
            *(number(row.figure(name), digits) for name, _, digits in COLUMNS),
        )
        for row in rows
    ]
    return aligned(header, body)


def interval_table(rows: Sequence[QualityRow]) -> str:
    """The judge's figures with their 95 % intervals."""
    shown = [COLUMNS[0], *(column for column in EXTRA if any(column[0] in row.figures for row in rows))]
    header = ("mode", *(title for _, title, _ in shown))
    return aligned(header, [(row.spec or row.mode, *(interval(row, n, d) for n, _, d in shown)) for row in rows])


def reasons(rows: Sequence[QualityRow]) -> list[str]:
    """Why figures are missing: a sentence for each reason, with the rows that it holds for."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for name, reason in row.reasons.items():
            found.setdefault((name, reason), []).append(row.spec or row.mode)
    return [
        f"no {name}{'' if len(who) == len(rows) else ' of ' + ', '.join(who)}: {reason}"
        for (name, reason), who in found.items()
    ]


def meanings() -> list[tuple[str, str]]:
    """Each column's title and its sentence."""
    titles = {name: title for name, title, _ in (*COLUMNS, *EXTRA)}
    return [(titles[name], sentence) for name, sentence in (PANEL | DERIVED).items()]


def number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def interval(row: QualityRow, name: str, digits: int) -> str:
    """A figure with what lies within 95 %."""
    estimate = row.figures.get(name)
    if estimate is None or estimate.low is None or estimate.high is None:
        return number(row.figure(name), digits)
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


_SAMPLES_STYLE = """
.texts { display: grid; grid-template-columns: 9rem 1fr; gap: .35rem .9rem; font-size: .85rem; }
.texts dt { font-weight: 600; overflow-wrap: anywhere; } .texts dd { margin: 0; white-space: pre-wrap;
  overflow-wrap: anywhere; font-family: ui-monospace, monospace; } .prompt { opacity: .55; }
"""

_READING = """Every figure is read beside the row <b>human</b>: the true continuations of the same prompts. A judge
alone can be cheated by text that is too even, so low judge bits count only where the entropies beside them are as high
as human ones. In brackets: 95 % intervals over prompts (bootstrap; of the entropies: jackknife)."""


def quality_page(record: dict[str, Any]) -> str:
    """The whole page, from the record of a run."""
    rows = [QualityRow.from_record(row) for row in record["rows"]]
    prompts = record["prompts"]
    title = f"onesweep: what the text is worth, {prompts['count']} prompts of {prompts['path']}"
    parts = [
        f"<h1>{shown(title)}</h1>",
        f"<p>{prompts['prompt_bytes']} bytes of prompt, {prompts['bytes']} bytes of text; judge "
        f"{shown(record['judge'])}; {prompts['reference_count']} other passages as the human reference.</p>",
        f"<pre>{shown(record['command'])}</pre>",
        *_figures(rows),
        "<h2>The first texts, unselected</h2>",
        *(_texts(sample) for sample in record["samples"]),
        "<h2>Settings</h2>",
        _origin(record),
    ]
    return html_page(title, parts, _SAMPLES_STYLE)


def check_page(record: dict[str, Any]) -> str:
    """The whole page of a check, from its record."""
    rows = [QualityRow.from_record(row) for row in record["rows"]]
    title = f"onesweep: the ruler held against itself, {record['prompts']['path']}"
    verdicts = [
        [
            shown(name),
            "human" if one["human_wins"] else "<span class='bad'>the cheat</span>",
            shown(one["nearer"]) or "-",
            shown(one["farther"]) or "-",
        ]
        for name, one in record["verdicts"].items()
    ]
    parts = [
        f"<h1>{shown(title)}</h1>",
        f"<pre>{shown(record['command'])}</pre>",
        "<p>Human text against texts made from it that please single figures: in most figures it must be nearer to "
        "other human text (row <b>reference</b>).</p>",
        html_table(["human against", "wins", "nearer in", "farther in"], verdicts, text_columns=4),
        *_figures(rows),
        "<h2>Settings</h2>",
        _origin(record),
    ]
    return html_page(title, parts)


def _figures(rows: Sequence[QualityRow]) -> list[str]:
    columns = [*COLUMNS, *(column for column in EXTRA if any(column[0] in row.figures for row in rows))]
    costs = [column for column in COSTS if any(getattr(row, column[0]) is not None for row in rows)]
    body = [
        [
            shown(row.spec or row.mode),
            *(number(getattr(row, name), digits) for name, _, digits in costs),
            *(shown(interval(row, name, digits)) for name, _, digits in columns),
        ]
        for row in rows
    ]
    head = ["mode", *(title for _, title, _ in (*costs, *columns))]
    missing = "".join(f"<li>{shown(line)}</li>" for line in reasons(rows))
    return [
        "<h2>The panel</h2>",
        f"<p>{_READING}</p>",
        html_table(head, body, text_columns=1),
        f"<ul>{missing}</ul>" if missing else "",
        "<h2>What the figures mean</h2>",
        html_pairs(dict(meanings())),
    ]


def _texts(sample: dict[str, Any]) -> str:
    entries = {"prompt": "", HUMAN: sample[HUMAN], **sample["texts"]}
    prompt = f'<span class="prompt">{shown(sample["prompt"])}</span>'
    items = "".join(f"<dt>{shown(name)}</dt><dd>{prompt}{shown(text)}</dd>" for name, text in entries.items() if text)
    return f'<figure><dl class="texts">{items}</dl></figure>'


def _origin(record: dict[str, Any]) -> str:
    known = {key: value for key, value in record.items() if key not in ("rows", "samples", "verdicts", "machine")}
    return html_pairs(known | record["machine"])


INFILL_COLUMNS = (
    ("exact_match", "exact", 3),
    ("span_bits", "span bits", 3),
    ("joined_bits", "joined bits", 3),
    ("after_bits", "after bits", 3),
    ("joined_ngram_bits", "n-gram joined", 3),
    ("joined_minus_ar", "joined - ar", 3),
    ("between_minus_ar", "between - ar", 2),
)
_INFILL_HEADER = ("mode", "bytes", "sweeps", "s", "effective", *(title for _, title, _ in INFILL_COLUMNS))


def infill_table(rows: Sequence[InfillRow]) -> str:
    """Figures for a terminal; of the differences, with intervals."""
    return aligned(_INFILL_HEADER, [_infill_cells(row) for row in rows])


def infill_page(record: dict[str, Any], rows: Sequence[InfillRow]) -> str:
    """The whole page."""
    body = [[shown(cell) for cell in _infill_cells(row)] for row in rows]
    samples = []
    for sample in record["samples"]:
        texts = {HUMAN: sample[HUMAN], **sample["texts"]}
        lines = [[shown(label), f"{shown(sample['prompt'])}<b>{shown(text)}</b>{shown(sample['suffix'])}"]
                 for label, text in texts.items()]  # fmt: skip
        samples.append(html_table(["mode", f"{sample['length']} bytes"], lines, text_columns=2))
    parts = [
        "<h1>onesweep: gaps filled</h1>",
        f"<pre>{shown(record['command'])}</pre>",
        html_table(_INFILL_HEADER, body, text_columns=1),
        html_pairs({title: INFILL_FIGURES[name] for name, title, _ in INFILL_COLUMNS}),
        "<h2>The first gaps, unselected</h2>",
        *samples,
        "<h2>Settings</h2>",
        html_pairs(record["settings"] | {"judge": record["judge"], "commit": record["commit"]} | record["machine"]),
    ]
    return html_page("onesweep: gaps filled", parts)


def _infill_cells(row: InfillRow) -> list[str]:
    cells = [row.mode, str(row.length), number(row.sweeps, 1), number(row.seconds, 3), number(row.effective_samples, 1)]
    for name, _, digits in INFILL_COLUMNS:
        estimate = row.figures.get(name)
        text = number(estimate.value if estimate else None, digits)
        if estimate and estimate.low is not None and estimate.high is not None:
            text += f" [{estimate.low:.2f}, {estimate.high:.2f}]"
        cells.append(text)
    return cells
