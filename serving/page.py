"""Results side by side: one HTML file that needs no other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from serving.client import Result
from serving.table import printable, titled

_STYLE = """
:root { color-scheme: light dark; --line: #8a93a055; --bad: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a7a; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 2rem auto; padding: 0 1rem;
  background: Canvas; color: CanvasText; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 0 0 .4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.texts { display: grid; grid-template-columns: repeat(auto-fill, minmax(22rem, 1fr)); gap: 1rem; margin: 1.5rem 0; }
article { border: 1px solid var(--line); border-radius: .4rem; padding: .8rem; }
p.text { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.45 ui-monospace, monospace; }
.given { opacity: .55; } .bad { color: var(--bad); } .small { font-size: .82rem; opacity: .8; }
code { font: .85rem ui-monospace, monospace; overflow-wrap: anywhere; }
"""

_COLUMNS = (
    "mode", "latency ms", "first byte ms", "sweeps", "hops", "wire bytes", "host-seconds", "compute ms", "scorer",
    "chunk", "candidates", "effective", "accepted", "KL bits a byte",
)  # fmt: skip

_READING = """Latency is the router's, from admission to the last byte. Wire bytes are the payload of all hops of all
sweeps. Host-seconds and compute are arithmetic, on the hosts and in all. Effective: of the candidates, as their weights
leave them. Accepted: share of the guesses that counted. KL: of drafter and scorer. The sign &#xFFFD; stands for bytes
that are no UTF-8, and for control characters."""


def comparison_page(prompt: str, suffix: str, outcomes: dict[str, Result | str], settings: dict[str, Any]) -> str:
    """The whole page.

    :param outcomes: for each mode its Result, or the sentence that says why there is none.
    :param settings: of the requests; those that are None were the router's to choose.
    """
    results = {label: outcome for label, outcome in outcomes.items() if isinstance(outcome, Result)}
    given = {name: value for name, value in settings.items() if value is not None and value != ""}
    parts = [
        "<h1>onesweep: one prompt, several modes</h1>",
        f"<p>Given: <code>{_shown(prompt)}</code>" + (f" … <code>{_shown(suffix)}</code>" if suffix else "") + "</p>",
        _table(_COLUMNS, [_row(label, result) for label, result in results.items()]),
        '<div class="texts">' + "".join(_card(prompt, suffix, *pair) for pair in outcomes.items()) + "</div>",
        f'<p class="small">{_READING}</p>',
        _table(("setting", "value"), [(name, _plain(str(value))) for name, value in given.items()]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>onesweep compare</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _row(label: str, result: Result) -> tuple[str, ...]:
    acceptance = result.acceptance
    return (
        titled(label, result),
        f"{result.latency_ms:.1f}",
        f"{result.first_byte_ms:.1f}",
        str(result.sweeps),
        str(result.hops),
        f"{result.wire_bytes_total:,}",
        f"{result.host_seconds:.3f}",
        f"{result.compute_ms:.1f}",
        result.scorer or "-",
        str(result.chunk or "-"),
        str(result.candidates or "-"),
        f"{result.effective_samples:.1f}" if result.effective_samples else "-",
        "-" if acceptance is None else f"{acceptance:.2f}",
        f"{result.divergence_bits:.3f}" if result.divergence_bits else "-",
    )


def _card(prompt: str, suffix: str, label: str, outcome: Result | str) -> str:
    if isinstance(outcome, str):
        return f'<article><h2>{_shown(label)}</h2><p class="bad">{_shown(outcome)}</p></article>'
    after = f'<span class="given">{_shown(suffix)}</span>' if outcome.mode == "infill" else ""
    reason = f'<p class="small">{_shown(outcome.reason)}</p>' if outcome.reason else ""
    return (
        f'<article><h2>{_shown(titled(label, outcome))}</h2><p class="text"><span class="given">{_shown(prompt)}</span>'
        f'{_shown(outcome.text)}{after}</p>{reason}<p class="small">seed {outcome.seed}, {outcome.output_bytes} bytes'
        f"</p></article>"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(line(cells, "td") for cells in rows)
    return f'<div class="wide"><table><thead>{line(header, "th")}</thead><tbody>\n{body}\n</tbody></table></div>'


def _plain(text: str) -> str:
    return printable(text, newline="\n")


def _shown(text: str) -> str:
    """Text that is safe in HTML."""
    return escape(_plain(text))
