"""The report: one HTML file that needs no other."""

from __future__ import annotations

from loadtest.chaos.faults import FAULTS
from loadtest.chaos.picture import time_line
from loadtest.chaos.run import ChaosResult
from loadtest.chaos.table import FAULT_HEAD, LIFE_HEAD, MODE_HEAD, fault_rows, life_rows, mode_rows, verdict
from loadtest.machine import Machine
from loadtest.page import html_page, html_pairs, shown, text_table

HAPPENED_HEAD = ("at s", "fault", "on", "for s", "whole again s later")


def chaos_page(result: ChaosResult, command: str, commit: str, machine: Machine) -> str:
    """Of `chaos` and of `soak`."""
    settings = result.settings
    title = f"{settings.minutes:g} minutes, {len(result.happened)} faults, profile {settings.profile}"
    bad = ' class="bad"' if result.trouble else ""
    parts = [
        f"<h1>{shown(title)}</h1>",
        f"<ul{bad}>" + "".join(f"<li>{shown(line)}</li>" for line in verdict(result)) + "</ul>",
        f"<figure>{time_line(result)}</figure>",
        "<h2>Requests</h2>",
        text_table(MODE_HEAD, mode_rows(result), 1),
    ]
    if result.happened:
        parts += [
            "<h2>What faults cost the requests that they hit</h2>",
            text_table(FAULT_HEAD, fault_rows(result), 1),
            "<h2>Faults</h2>",
            text_table(HAPPENED_HEAD, _happened_rows(result), 0),
            html_pairs({name: fault.words for name, fault in FAULTS.items()}),
        ]
    parts += ["<h2>Processes</h2>", text_table(LIFE_HEAD, life_rows(result), 1), "<h2>Settings</h2>"]
    parts.append(
        html_pairs(
            {
                "command": command,
                "commit": commit,
                "requests at once": settings.at_once,
                "patience of a request": f"{settings.patience_s:g} s",
                "seed": settings.seed,
                "machine": machine.sentence,
            }
        )
    )
    return html_page(title, parts)


def _happened_rows(result: ChaosResult) -> list[list[str]]:
    return [
        [
            f"{fault.begin_s - result.begin_s:.1f}",
            fault.kind,
            fault.target,
            f"{fault.end_s - fault.begin_s:.1f}",
            "-" if fault.sound_s is None else f"{fault.sound_s - fault.end_s:.1f}",
        ]
        for fault in result.happened
    ]
