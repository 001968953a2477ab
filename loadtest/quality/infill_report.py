"""The command `onesweep bench infill`, its table and its page."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from loadtest.quality.infill import InfillRow

    Subparsers = _SubParsersAction[argparse.ArgumentParser]

COLUMNS = (
    ("exact_match", "exact", 3),
    ("span_bits", "span bits", 3),
    ("joined_bits", "joined bits", 3),
    ("after_bits", "after bits", 3),
    ("joined_ngram_bits", "n-gram joined", 3),
    ("joined_minus_ar", "joined - ar", 3),
    ("between_minus_ar", "between - ar", 2),
)


def register_infill(benches: Subparsers) -> None:
    from loadtest.load.access import add_access_options

    infill = benches.add_parser("infill", help="gaps in held-out text: filled with and without a look at what follows")
    infill.add_argument("--prompts", type=Path, required=True, metavar="PATH", help="held-out text: a file or folder")
    infill.add_argument("--modes", metavar="M[,M]", help="such as infill:ar:candidates=32 (infill,ar,local)")
    infill.add_argument("--lengths", default="4,8,16", metavar="N[,N]", help="bytes of a gap (4,8,16)")
    infill.add_argument("--count", type=int, default=100, metavar="N", help="gaps of each length (100)")
    infill.add_argument("--prompt-bytes", type=int, default=64, metavar="N", help="bytes before a gap (64)")
    infill.add_argument("--judge", metavar="NAME", help="smollm2-135m, ngram (the first that is installed)")
    infill.add_argument("--train", type=Path, metavar="PATH", help="training text (train.txt beside the prompts)")
    infill.add_argument("--seed", type=int, default=0, metavar="S", help="shifts the gaps; gap i has S + i (0)")
    infill.add_argument("--weights", type=Path, metavar="DIR", help="bundle to serve (the shipped weights)")
    add_access_options(infill)
    infill.add_argument("--in-flight", type=int, default=4, metavar="N", help="requests at once (4)")
    infill.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    infill.add_argument("--html", type=Path, metavar="FILE", help="write a report with samples there")
    infill.set_defaults(run=run_infill_command)


def run_infill_command(options: argparse.Namespace) -> int:
    from loadtest.commands import numbers
    from loadtest.destination import check_destination, write_json
    from loadtest.load.access import Access
    from loadtest.meter import open_meter
    from loadtest.page import write_page
    from loadtest.quality.infill import run_infill
    from loadtest.quality.run import QualitySettings
    from serving.deployment import ends_cleanly
    from stages.errors import InputError

    lengths = numbers(options.lengths, "--lengths")
    if not lengths:
        raise InputError("--lengths is empty: name one or more, such as 4,8,16")
    settings = QualitySettings(
        options.prompts,
        options.modes,
        options.count,
        max(lengths),
        options.prompt_bytes,
        options.judge,
        options.train,
        options.seed,
        options.weights.resolve() if options.weights else None,
        Access.of(options),
        in_flight=options.in_flight,
    )
    for path, flag in ((options.json, "--json"), (options.html, "--html")):
        if path:
            check_destination(path, flag)
    with ends_cleanly():
        result = run_infill(settings, list(dict.fromkeys(lengths)), shlex.join(["onesweep", *sys.argv[1:]]), open_meter)
    print(infill_table(result.rows))
    print(f"\n{settings.count} gaps of each length, {settings.prompt_bytes} bytes before them; judge {result.judge}")
    if options.json:
        write_json(options.json, result.record())
    if options.html:
        write_page(options.html, infill_page(result.record(), result.rows))
    return 0


def infill_table(rows: Sequence[InfillRow]) -> str:
    """Figures for a terminal; of the differences, with intervals."""
    from loadtest.table import aligned

    return aligned(_header(), [_cells(row) for row in rows])


def infill_page(record: dict[str, Any], rows: Sequence[InfillRow]) -> str:
    """The whole page."""
    from loadtest.page import html_page, html_pairs, html_table, shown
    from loadtest.quality.infill import FIGURES
    from loadtest.quality.row import HUMAN

    body = [[shown(cell) for cell in _cells(row)] for row in rows]
    samples = []
    for sample in record["samples"]:
        texts = {HUMAN: sample[HUMAN], **sample["texts"]}
        lines = [[shown(label), f"{shown(sample['prompt'])}<b>{shown(text)}</b>{shown(sample['suffix'])}"]
                 for label, text in texts.items()]  # fmt: skip
        samples.append(html_table(["mode", f"{sample['length']} bytes"], lines, text_columns=2))
    parts = [
        "<h1>onesweep: gaps filled</h1>",
        f"<pre>{shown(record['command'])}</pre>",
        html_table(_header(), body, text_columns=1),
        html_pairs({title: FIGURES[name] for name, title, _ in COLUMNS}),
        "<h2>The first gaps, unselected</h2>",
        *samples,
        "<h2>Settings</h2>",
        html_pairs(record["settings"] | {"judge": record["judge"], "commit": record["commit"]} | record["machine"]),
    ]
    return html_page("onesweep: gaps filled", parts)


def _header() -> list[str]:
    return ["mode", "bytes", "sweeps", "s", "effective", *(title for _, title, _ in COLUMNS)]


def _cells(row: InfillRow) -> list[str]:
    from loadtest.quality.table import number

    cells = [row.mode, str(row.length), number(row.sweeps, 1), number(row.seconds, 3), number(row.effective_samples, 1)]
    for name, _, digits in COLUMNS:
        estimate = row.figures.get(name)
        text = number(estimate.value if estimate else None, digits)
        if estimate and estimate.low is not None and estimate.high is not None:
            text += f" [{estimate.low:.2f}, {estimate.high:.2f}]"
        cells.append(text)
    return cells
