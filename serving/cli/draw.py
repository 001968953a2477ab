"""The command `draw`: writes pictures of a class to a PNG file."""

import argparse
import json
import sys
from pathlib import Path

from serving.cli.generate import add_router_options, add_wait, client_of, wait_ready
from serving.client.result import DrawnPictures
from serving.drawing.request import DrawingRequest
from serving.modes import DRAWING_MODES
from serving.router.request import DEFAULT_TIMEOUT_S
from stages.errors import InputError
from stages.progress import aligned, counted
from stages.settings import add_flags, check_destination
from stages.signals import deferred

SCALE = 4  # file pixels per drawn pixel, for pictures smaller than SMALL
SMALL = 128


def add_draw(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="a class or its number")
    parser.add_argument("--all", action="store_true", help="all classes")
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="new PNG file")
    parser.add_argument("--compare", action="store_true", help="the same pictures in every mode, one row each")
    parser.add_argument("--previews", action="store_true", help="how the pictures clear, one row per host")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_router_options(parser)
    add_wait(parser)
    add_flags(parser, DrawingRequest)
    parser.add_argument("--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="deadline (120)")


def run_draw(options: argparse.Namespace) -> int:
    if options.compare and (options.previews or options.mode):
        raise InputError("--compare draws in every mode: leave out --mode and --previews")
    if bool(options.classes) == options.all:
        raise InputError("name a class, such as `onesweep draw sneaker --out sneaker.png`, or give --all")
    # check first: a picture may take minutes over far links, too long to lose it to a typo
    if options.out.suffix.lower() != ".png":
        raise InputError(f"--out {options.out}: pictures are written as PNG; give a name that ends in .png")
    if options.out.exists():
        raise InputError(f"{options.out} already exists: name another file, or remove it")
    check_destination(options.out, "--out")
    names = ("pictures", "mode", "seed", "levels", "solver", "guidance", "codec", "timeout_s")
    settings = {name: value for name in names if (value := getattr(options, name)) is not None}
    wait_ready(options, options.mode)
    with client_of(options) as client:
        status = client.status() if options.all or options.compare else None
        if status is not None and not status.HasField("pictures"):
            raise InputError(f"the router at {client.address} serves no model that draws: serve a picture bundle")
        classes = tuple(options.classes) or tuple(status.pictures.classes if status else ())
        # A row holds the pictures of one class, or with one picture each, all classes.
        columns = settings.get("pictures", 1) if settings.get("pictures", 1) > 1 else len(classes)
        if status is not None and options.compare:
            served = [mode for mode in DRAWING_MODES if mode in status.drawing_modes]
            rows = [client.draw(classes, **{**settings, "mode": mode}) for mode in served]
        else:
            shown: list[DrawnPictures] = []
            drawn = client.draw(classes, preview=shown.append if options.previews else None, **settings)
            rows = [*sorted(shown, key=lambda preview: preview.block or 0), drawn]
    _write(options.out, rows, columns)
    results = [row for row in rows if row.block is None]
    if options.json:
        print(json.dumps([{**result.as_json(), "file": str(options.out)} for result in results]))
        return 0
    print(f"{options.out}: {counted(len(results[-1]), 'picture')}" + " in each mode" * options.compare)
    if options.compare:
        print(_table(results))
        return 0
    (result,) = results
    print(
        f"[{result.mode}, seed {result.seed}, {counted(result.levels, 'level')}: {counted(result.sweeps, 'trip')}, "
        f"{result.hops} hops, {result.wire_bytes_total} bytes on the wire, {result.latency_ms / 1000:.2f} s, "
        f"{result.compute_ms / 1000:.2f} s of compute]",
        file=sys.stderr,
    )
    return 0


def _table(results: list[DrawnPictures]) -> str:
    """A row for each mode, in the order of the file's rows."""
    rows = [("mode", "trips", "seconds", "wire bytes", "compute seconds")]
    for each in results:
        seconds, compute_s = each.latency_ms / 1000, each.compute_ms / 1000
        rows.append((each.mode, f"{each.sweeps}", f"{seconds:.2f}", f"{each.wire_bytes_total:,}", f"{compute_s:.2f}"))
    return "\n".join(aligned(rows))


def _write(path: Path, rows: list[DrawnPictures], columns: int) -> None:
    import numpy as np

    from stages.checkpoint.files import staged_file

    pixels = np.concatenate([row.pixels for row in rows])
    scale = SCALE if max(pixels.shape[2:]) < SMALL else 1
    sheet = DrawnPictures(pixels).sheet(columns, scale)
    with staged_file(path, lambda file: sheet.save(file, "PNG")) as staged, deferred():  # else an empty file may stay
        try:
            path.open("xb").close()  # take the name first: a rename would replace a file that came while we drew
        except FileExistsError:
            raise InputError(f"{path} appeared while drawing and is not replaced: draw to another file") from None
        staged.replace(path)
