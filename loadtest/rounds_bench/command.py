"""Other commands of onesweep, run to their end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from serving.deployment import MODULE
from stages.errors import InputError, OnesweepError


def answer_of(arguments: Sequence[str], within_s: float) -> dict[str, Any]:
    """What a command says with `--json`. Raises InputError, OnesweepError with its last words."""
    command = [sys.executable, *MODULE, *arguments, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=within_s)
    except subprocess.TimeoutExpired:
        raise OnesweepError(f"`onesweep {arguments[0]}` has not ended after {within_s:.0f} s") from None
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("onesweep: ")
        raise (InputError if done.returncode == 2 else OnesweepError)(words)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
