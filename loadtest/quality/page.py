"""The report: the panel, what each figure means, and the first texts as they came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.page import html_page, html_pairs, html_table, shown
from loadtest.quality.row import HUMAN, QualityRow
from loadtest.quality.table import COLUMNS, COSTS, EXTRA, interval, meanings, number, reasons

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
