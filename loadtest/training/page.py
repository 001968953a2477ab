"""The report: one HTML file that needs no other."""

from __future__ import annotations

from collections.abc import Sequence

from loadtest.machine import Machine
from loadtest.page import html_page, html_pairs, html_table, shown
from loadtest.training.faults import FAULTS
from loadtest.training.picture import time_line
from loadtest.training.run import TrainingResult
from loadtest.training.table import (
    FAULT_HEAD,
    HAPPENED_HEAD,
    LIE_HEAD,
    SCORE_HEAD,
    fault_rows,
    happened_rows,
    lie_rows,
    score_rows,
    verdict,
)


def training_page(result: TrainingResult, command: str, commit: str, machine: Machine) -> str:
    settings = result.settings
    title = f"A training of {result.rounds} rounds, {len(result.happened)} faults, profile {settings.profile}"
    bad = ' class="bad"' if result.trouble else ""
    parts = [
        f"<h1>{shown(title)}</h1>",
        f"<ul{bad}>" + "".join(f"<li>{shown(line)}</li>" for line in verdict(result)) + "</ul>",
        f"<figure>{time_line(result)}</figure>",
        "<h2>What it came to</h2>",
        _table(SCORE_HEAD, score_rows(result), 1),
        "<h2>How long faults kept work away</h2>",
        _table(FAULT_HEAD, fault_rows(result), 1),
        "<h2>Sabotage</h2>",
        _table(LIE_HEAD, lie_rows(result), 1),
        "<h2>Faults</h2>",
        _table(HAPPENED_HEAD, happened_rows(result), 0),
        html_pairs({name: fault.words for name, fault in FAULTS.items()}),
        "<h2>Settings</h2>",
        html_pairs(
            {
                "command": command,
                "commit": commit,
                "seed of the schedule": settings.seed,
                "lease": f"{settings.lease_s:g} s",
                "machine": machine.sentence,
            }
        ),
        f"<pre>{shown(result.run.text)}</pre>",
    ]
    return html_page(title, parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int) -> str:
    return html_table(list(map(shown, head)), [list(map(shown, row)) for row in rows], text_columns)
