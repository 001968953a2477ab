"""A report: one HTML file with everything in it, readable on a light and on a dark screen."""

import html
from collections.abc import Sequence
from typing import Any

STYLE = """
:root { color-scheme: light dark; --line: #8a93a055; --soft: #8a93a01c; --bad: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a7a; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  background: Canvas; color: CanvasText; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; } h3 { font-size: 1rem; }
figure { margin: 1rem 0; } figcaption { font-size: .87rem; opacity: .8; }
figure svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .82rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.wrap { white-space: normal; min-width: 22rem; }
tbody tr:hover { background: var(--soft); }
li { white-space: pre-wrap; }
.bad { color: var(--bad); }
code, pre { font: .82rem ui-monospace, monospace; } pre { overflow-x: auto; background: var(--soft); padding: .6rem; }
"""


def html_page(title: str, parts: Sequence[str], style: str = "") -> str:
    """The whole page. `parts` are HTML, `title` is text."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{shown(title)}</title><style>{STYLE}{style}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def html_table(head: Sequence[str], body: Sequence[Sequence[str]], text_columns: int) -> str:
    """:param text_columns: how many, from the left, are no figures. Cells are HTML."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="text"' if i < text_columns else "" for i in range(len(cells))]
        return "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))

    rows = "\n".join(f"<tr>{line(cells, 'td')}</tr>" for cells in body)
    return f'<div class="wide"><table><thead><tr>{line(head, "th")}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def text_table(head: Sequence[str], body: Sequence[Sequence[str]], text_columns: int) -> str:
    """`html_table` of cells that are text."""
    return html_table(list(map(shown, head)), [list(map(shown, row)) for row in body], text_columns)


def html_pairs(values: dict[str, Any]) -> str:
    """Keys and values, a row each; both are text."""
    rows = "\n".join(
        f'<tr><td>{shown(key)}</td><td class="text wrap">{shown(value)}</td></tr>' for key, value in values.items()
    )
    return f'<div class="wide"><table><tbody>\n{rows}\n</tbody></table></div>'


def figure(svg: str, caption: str = "") -> str:
    """A chart with its caption, which screen readers get as its name."""
    labelled = svg.replace("<svg", f'<svg role="img" aria-label="{shown(caption)}"', 1) if caption else svg
    below = f"<figcaption>{shown(caption)}</figcaption>" if caption else ""
    return f"<figure>{labelled}{below}</figure>"


def bullets(lines: Sequence[str], bad: bool = False) -> str:
    """A list of sentences; nothing where there is none. `bad`: in the colour of failures."""
    items = "".join(f"<li>{shown(line)}</li>" for line in lines)
    kind = ' class="bad"' if bad else ""
    return f"<ul{kind}>{items}</ul>" if lines else ""


def shown(value: object) -> str:
    """Text that is safe in HTML."""
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    return html.escape(str(value))
