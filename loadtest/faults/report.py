"""A run under faults as a time line, an HTML page, tables on the terminal and JSON; shared by all targets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from onesweep.loadtest.faults.base import Fault, FaultRecord, FaultRun
from onesweep.loadtest.report.chart import Panel, draw_timeline
from onesweep.loadtest.report.page import bullets, figure, html_page, html_pairs, shown, text_table
from onesweep.loadtest.report.record import MachineFacts, commit, origin, this_command, this_machine, write_report
from onesweep.loadtest.report.table import markdown, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE: dict[str, Any] = {"fontsize": 9, "loc": "left"}


@dataclass(frozen=True)
class ReportTable:
    """Figures in cells."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1  # how many, from the left, are no figures


@dataclass(frozen=True)
class FaultReport:
    """Everything that is written of a run, whatever its target."""

    run: FaultRun
    title: str
    verdict: list[str]  # a sentence a line
    trouble: int
    tables: Sequence[ReportTable]  # of the page. The words of all faults follow the one that is called Faults.
    printed: Sequence[ReportTable]  # on the terminal
    faults: Mapping[str, Fault[Any]]
    words: dict[str, str]  # for each kind of fault
    settings: dict[str, Any]
    record: dict[str, Any]  # times are seconds since the run began
    height: float  # of the time line, in inches
    panels: Sequence[Panel]
    seconds: float | None = None  # of the time line; None: of the run
    text: str = ""  # settings file, shown as it is

    def terminal(self) -> str:
        parts = [markdown(table.head, table.rows) for table in self.printed if table.rows]
        return "\n" + "\n\n".join([*parts, "\n".join(f"- {words}" for words in self.verdict)])

    def time_line(self) -> str:
        """An SVG element on a light ground of its own; text is drawn as paths."""
        start_s = self.run.begin_s
        spans = [(f.begin_s - start_s, f.end_s - start_s, self.faults[f.kind].colour) for f in self.run.faults]
        return draw_timeline(self.panels, spans, self.seconds or self.run.seconds, self.height, own_page=True)

    def page(self, command: str, commit: str, machine: MachineFacts) -> str:
        """One HTML file that needs no other."""
        parts = [
            f"<h1>{shown(self.title)}</h1>",
            bullets(self.verdict, bad=bool(self.trouble)),
            figure(self.time_line()),
        ]
        for table in self.tables:
            parts += [f"<h2>{table.title}</h2>", text_table(table.head, table.rows, table.text_columns)]
            if table.title == "Faults":
                parts.append(html_pairs(self.words))
        about = {"command": command, "commit": commit, **self.settings, "machine": machine.sentence}
        parts += ["<h2>Settings</h2>", html_pairs(about)]
        return html_page(self.title, [*parts, f"<pre>{shown(self.text)}</pre>"] if self.text else parts)

    def write(self, options: argparse.Namespace) -> None:
        """Write the files of `write_report`. Raises OnesweepError when a file cannot be written after all."""

        def page() -> str:
            return self.page(this_command(), commit(), this_machine())

        write_report(options, {**origin(), **self.record}, page, lambda: self.time_line() + "\n")


seconds = partial(number, digits=2)


def draw_faults(
    axes: Axes,
    done: Sequence[tuple[FaultRecord, float | None]],
    faults: Mapping[str, Fault[Any]],
    begin_s: float,
    names: Sequence[str],
    title: str,
) -> None:
    """A row for each of `names`, which faults were done to; a thin line from a fault's end until its recovery."""
    for fault, until_s in done:
        row, colour, left = names.index(fault.target), faults[fault.kind].colour, fault.begin_s - begin_s
        end_s = fault.end_s - begin_s
        axes.barh(row, max(end_s - left, 1.0), left=left, color=colour, height=0.62)
        if until_s is not None:
            axes.plot([end_s, until_s - begin_s], [row, row], color=colour, linewidth=1.2, alpha=0.6)
        axes.annotate(fault.kind, (left, row), (0, 6.5), textcoords="offset points", fontsize=6.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(-0.6, max(len(names), 1) - 0.2)
    axes.set_title(title, **TITLE)
