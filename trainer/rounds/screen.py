"""Lines on a terminal that are written over in place, or one after the other where it is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import TextIO

HOME, CLEAR, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[2J", "\x1b[K", "\x1b[J"


class Screen:
    """One page of text, shown again and again."""

    def __init__(self, out: TextIO, in_place: bool) -> None:
        """:param in_place: whether `out` is a terminal whose lines may be written over."""
        self.out, self.in_place = out, in_place
        self._begun = False

    def show(self, lines: Sequence[str]) -> None:
        if self.in_place:
            text = framed(lines, shutil.get_terminal_size())
            self.out.write((HOME if self._begun else HOME + CLEAR) + text)
            self._begun = True
        else:
            self.out.write("\n".join(lines) + "\n\n")
        self.out.flush()


def framed(lines: Sequence[str], size: os.terminal_size) -> str:
    """What fits, with the rests of older lines wiped: nothing flickers, nothing scrolls."""
    room = max(size.lines - 1, 1)
    if len(lines) > room:
        lines = [*lines[: room - 1], f"... {len(lines) - room + 1} more lines"]
    return "".join(f"{line[: size.columns]}{END_OF_LINE}\n" for line in lines) + END_OF_SCREEN
