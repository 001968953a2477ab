"""Expected texts of the load and fault tests, and texts as tokens of a checkpoint."""

from collections.abc import Iterable

import torch

from loadtest.workload.caller import check_answer
from loadtest.workload.pipeline import InProcess, Work
from loadtest.workload.prompts import SeededPrompt
from loadtest.workload.testbed import Testbed
from serving.modes.tokenizer import Tokenizer

# Modes whose texts `InProcess` computes without a deployment, and so without its links, and how: speculation is exact,
# its texts are those of `ar`.
IN_PROCESS = {"sweep": "sweep", "chunked": "chunked", "ar": "ar", "ar-speculative": "ar"}


class Texts:
    """Expected texts, by mode and case. One object serves many runs with the same cases."""

    def __init__(self, target: Testbed, cases: tuple[SeededPrompt, ...], max_bytes: int) -> None:
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
        """The source of the texts, in words."""
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
        chosen = [self.cases[number] for number in numbers]
        answers = []
        for case in chosen:  # one at a time: batching must not be able to hide a difference
            call = {"prompt": case.prompt, "mode": mode, "max_bytes": self.max_bytes, "seed": case.seed}
            answers += self.target.caller.ask([call])
            check_answer(answers[-1])
        return [bytes.fromhex(answer["account"]["output_hex"]) for answer in answers]


def tokens_of(tokenizer: Tokenizer, prompt: bytes) -> list[int]:
    """A prompt in tokens; it must be UTF-8 where these are tokens."""
    return tokenizer.vocabulary.tokens(tokenizer.encode_text(prompt))
