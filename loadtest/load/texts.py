"""The texts that cases give alone: each computed once, one at a time, while the deployment has nothing else to do."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from loadtest.inprocess import InProcess, Work
from loadtest.load.prompts import Case
from loadtest.load.target import Target

IN_PROCESS = {"sweep": "sweep", "chunked": "chunked", "ar": "ar", "ar-speculative": "ar"}
"""Modes whose texts inprocess.py computes without a deployment, and so without its links, and how: speculation is
exact, its texts are those of `ar`."""


class Texts:
    """Expected texts, by mode and case. One object serves many runs with the same cases."""

    def __init__(self, target: Target, cases: tuple[Case, ...], max_bytes: int) -> None:
        self.target, self.cases, self.max_bytes = target, cases, max_bytes
        self._known: dict[tuple[str, int], bytes] = {}
        self._models: InProcess | None = None

    def of(self, mode: str, wanted: Iterable[int]) -> dict[int, bytes]:
        """Texts of the cases with these numbers. Raises OnesweepError."""
        numbers = sorted(set(wanted))
        missing = [number for number in numbers if (mode, number) not in self._known]
        texts = self._compute(mode, missing) if self._computes(mode) else self._ask(mode, missing)
        self._known.update({(mode, number): text for number, text in zip(missing, texts, strict=True)})
        return {number: self._known[mode, number] for number in numbers}

    def source(self, mode: str) -> str:
        """Where the texts come from, in words."""
        return "the same models in one process" if self._computes(mode) else "the idle deployment, one at a time"

    def _computes(self, mode: str) -> bool:
        return self.target.checkpoint is not None and mode in IN_PROCESS

    def _compute(self, mode: str, numbers: list[int]) -> list[bytes]:
        if self._models is None:
            assert self.target.checkpoint is not None
            torch.set_num_threads(1)  # as the hosts
            self._models = InProcess(self.target.checkpoint)
        cases = [self.cases[number] for number in numbers]
        return [self._models.generate(Work(IN_PROCESS[mode], c.prompt.encode(), self.max_bytes, c.seed)) for c in cases]

    def _ask(self, mode: str, numbers: list[int]) -> list[bytes]:
        if not numbers:
            return []
        requests = [
            {
                "prompt": self.cases[number].prompt,
                "mode": mode,
                "max_bytes": self.max_bytes,
                "seed": self.cases[number].seed,
            }
            for number in numbers
        ]
        _, *texts = self.target.ask(requests)
        return [bytes.fromhex(text) for text in texts]
