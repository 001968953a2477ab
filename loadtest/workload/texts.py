"""Reference texts of a run: as the deployment generates them alone, and under the model that generated them."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from loadtest.commands import echo
from loadtest.report.table import number_column
from loadtest.workload.prompts import SeededPrompt
from loadtest.workload.testbed import Testbed
from serving.modes import COPY, NO_COPY
from serving.modes.pretrained_tokenizer import tokenizer_of
from serving.modes.tokenizer import Tokenizer
from stages.backends.whole_model import MIN_TEMPERATURE, WholeModel
from stages.checkpoint.bundle import find_bundle, holds_copy
from stages.errors import InputError, ServiceError


class Texts:
    """Expected texts, by mode and case. One object serves many runs with the same cases."""

    def __init__(self, target: Testbed, cases: tuple[SeededPrompt, ...], max_bytes: int) -> None:
        self.target, self.cases, self.max_bytes = target, cases, max_bytes
        self._known: dict[tuple[str, int], bytes] = {}

    def of(self, mode: str, case_numbers: Iterable[int]) -> dict[int, bytes]:
        """Texts of the cases with these numbers. Raises OnesweepError."""
        numbers = sorted(set(case_numbers))
        for number in numbers:
            if (mode, number) not in self._known:
                self._known[mode, number] = self._text(mode, self.cases[number])
        return {number: self._known[mode, number] for number in numbers}

    def _text(self, mode: str, case: SeededPrompt) -> bytes:
        call = {"prompt": case.prompt, "mode": mode, "max_bytes": self.max_bytes, "seed": case.seed}
        (answer,) = self.target.caller.ask([call])  # one at a time, so that batching cannot hide a difference
        if "error" in answer:
            raise (InputError if answer["exit_code"] == InputError.exit_code else ServiceError)(answer["error"])
        return bytes.fromhex(answer["account"]["output_hex"])


def served_copy(checkpoint: Path) -> tuple[str, ...]:
    """The mode that generates with a bundle's copy alone; prints a sentence if there is none."""
    if holds_copy(checkpoint):
        return (COPY,)
    echo(f"skipping {COPY}: {NO_COPY}")
    return ()


LOCAL_COLUMNS = (number_column("KL nats", "kl_nats", 4), number_column("agrees", "agreement", 3))


def local_distance(checkpoint: Path, texts: Iterable[tuple[bytes, bytes]]) -> dict[str, float]:
    """Distance of `local/` from the bundle's model, both in this process, by the next token at each position of texts.

    :param texts: prompts, and their continuations, whose positions count.

    Returns `kl_nats`, KL(model || local) for a token at temperature 1, and `agreement`, the share of places where both
    find the same token the likeliest; nothing where there are not both, of the same tokens. Raises CheckpointError.
    """
    bundle = find_bundle(checkpoint)
    if bundle.ar is None or bundle.local is None:
        return {}
    tokenizer, models = tokenizer_of(bundle.ar), (WholeModel(bundle.ar), WholeModel(bundle.local))
    if tokenizer.id != tokenizer_of(bundle.local).id:
        return {}
    kl_nats, same, places = 0.0, 0, 0
    for prompt, output in texts:
        (log_p, _), (log_q, _) = (_places(model, tokenizer, prompt, output) for model in models)
        kl_nats += float((log_p.exp() * (log_p - log_q)).sum())
        same += int((log_p.argmax(1) == log_q.argmax(1)).sum())
        places += len(log_p)
    return {"kl_nats": kl_nats / places, "agreement": same / places} if places else {}


class TextNats(NamedTuple):
    """A text under the model at a temperature: its nats, and those of the model's own texts at its positions."""

    nats: float  # -ln p of its tokens, together
    entropy: float  # of the model at their positions, summed, nats
    tokens: int


def text_nats(checkpoint: Path, texts: Iterable[tuple[bytes, bytes, float]]) -> list[TextNats]:
    """Score (prompt, continuation, temperature) under the model of `ar`, in this process; empty without it.

    Raises CheckpointError."""
    if (directory := find_bundle(checkpoint).ar) is None:
        return []
    tokenizer, model, found = tokenizer_of(directory), WholeModel(directory), list[TextNats]()
    for prompt, output, temperature in texts:
        log_p, tokens = _places(model, tokenizer, prompt, output, temperature)
        nats = -log_p.gather(1, tokens[:, None]).sum()
        found.append(TextNats(float(nats), -float((log_p.exp() * log_p).sum()), len(tokens)))
    return found


@torch.inference_mode()
def _places(
    model: WholeModel, tokenizer: Tokenizer, prompt: bytes, output: bytes, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """ln p (tokens, vocabulary) at each position of `output`, and the tokens there (tokens,)."""
    known, first = (tokens_of(tokenizer, text) for text in (prompt + output, prompt))
    logits = model.logits(torch.tensor(known))[len(first) - 1 : -1]
    return (logits / max(temperature, MIN_TEMPERATURE)).log_softmax(1), torch.tensor(known[len(first) :])


def tokens_of(tokenizer: Tokenizer, prompt: bytes) -> list[int]:
    """A prompt in tokens; must be UTF-8 unless they are bytes."""
    return tokenizer.vocabulary.tokens(tokenizer.encode_text(prompt))
