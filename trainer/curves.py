"""A picture of the training curves."""

from __future__ import annotations

from pathlib import Path

from stages.checkpoint import replace_file
from trainer.log import read_records


def draw_curves(directory: Path) -> Path | None:
    """Draw every NAME.jsonl of `directory` into curves.png; None without matplotlib (extra `plots`)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture of the curves: install onesweep[plots]")
        return None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for path in sorted(directory.glob("*.jsonl")):
        records = read_records(path)
        for key, style in (("next_byte_nats", "-"), ("denoise_nats", ":"), ("valid_next_byte_nats", "o")):
            points = [(r["step"], r[key]) for r in records if key in r]
            if points:
                axes.plot(*zip(*points, strict=True), style, markersize=3, linewidth=1, label=f"{path.stem} {key[:-5]}")
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy, nats a byte")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=7)
    target = directory / "curves.png"
    replace_file(target, lambda path: figure.savefig(path, dpi=120, format="png"))
    return target
