"""Makes docs/demo.svg: a terminal with what `onesweep demo` prints, as it ran on this machine.

    python .ci/demo_picture.py

Needs the package rich.
"""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
TITLE = "onesweep demo"


def main() -> int:
    demo = [sys.executable, "-P", "-m", "onesweep", "demo"]
    shown = subprocess.run(demo, stdout=subprocess.PIPE, text=True, check=True).stdout
    lines = [f"$ {TITLE}", *shown.splitlines()]
    console = Console(record=True, width=max(map(len, lines)), file=io.StringIO(), legacy_windows=False)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    console.save_svg(str(ROOT / "docs" / "demo.svg"), title=TITLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
