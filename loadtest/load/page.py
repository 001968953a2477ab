"""The report: one HTML file that needs no other."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from loadtest.load.knee import Climb
from loadtest.load.pictures import knee_picture, latency_picture
from loadtest.load.run import LoadResult
from loadtest.load.scene import Scene
from loadtest.load.table import HEADER, knee_notes, row, run_notes

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .facts td, .facts th { text-align: left; white-space: normal; }
svg { max-width: 100%; height: auto; } li { white-space: pre-wrap; }
"""


def load_page(scene: Scene, result: LoadResult) -> str:
    """The report of one run."""
    picture = latency_picture(result.figures, result.judged)
    return _page(f"{result.users} users of {result.mode}", picture, [result], run_notes(result), scene)


def knee_page(scene: Scene, climbs: Sequence[Climb]) -> str:
    """The report of a climb to the knee, all modes in one picture."""
    results = [result for climb in climbs for result in climb.results]
    return _page("latency against throughput", knee_picture(climbs), results, knee_notes(climbs), scene)


def _page(title: str, picture: str, results: Sequence[LoadResult], notes: Sequence[str], scene: Scene) -> str:
    body = [
        f"<h1>onesweep load test: {escape(title)}</h1>",
        picture,
        _table(HEADER, [row(result) for result in results]),
        "<ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>",
        "<h2>Settings</h2>",
        _table(("what", "value"), scene.rows(), "facts"),
    ]
    head = f'<meta charset="utf-8"><title>onesweep load test</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>' + "\n".join(body) + "</body></html>\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "wide") -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(cells, "td") for cells in rows)
    return f'<div class="{kind}"><table>{line(header, "th")}{body}</table></div>'
