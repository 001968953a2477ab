"""The report: one HTML file that needs no other."""

from __future__ import annotations

from loadtest.machine import Machine
from loadtest.page import html_page, html_pairs, shown, text_table
from loadtest.training.faults import FAULTS
from loadtest.training.picture import time_line
from loadtest.training.run import TrainingResult
from loadtest.training.table import tables, verdict


def training_page(result: TrainingResult, command: str, commit: str, machine: Machine) -> str:
    settings = result.settings
    title = f"A training of {result.rounds} rounds, {len(result.happened)} faults, profile {settings.profile}"
    bad = ' class="bad"' if result.trouble else ""
    parts = [
        f"<h1>{shown(title)}</h1>",
        f"<ul{bad}>" + "".join(f"<li>{shown(line)}</li>" for line in verdict(result)) + "</ul>",
        f"<figure>{time_line(result)}</figure>",
        *(f"<h2>{each.title}</h2>\n{text_table(each.head, each.rows, each.text_columns)}" for each in tables(result)),
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
