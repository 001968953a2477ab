"""The source of an imported model, run by `transformers`: the implementation that its text should be that of."""

from __future__ import annotations

import contextlib
import io
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.errors import InputError, OnesweepError


def check_transformers() -> None:
    """Raises InputError where the package is missing."""
    if find_spec("transformers") is None:
        raise InputError("bench parity needs the package transformers: pip install 'onesweep[quality]'")


class Reference:
    """One text at a time, read on token by token."""

    def __init__(self, source: Path) -> None:
        """:param source: a Hugging Face folder, or a .gguf file. float32. Raises OnesweepError."""
        try:
            from transformers import AutoModelForCausalLM, logging
        except ImportError as error:
            raise InputError(f"the package transformers does not work here: {error}") from None
        logging.set_verbosity_error()
        file = {"gguf_file": source.name} if source.is_file() else {}
        directory = source.parent if source.is_file() else source
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # progress bars
                self._model = AutoModelForCausalLM.from_pretrained(
                    str(directory), **file, local_files_only=True, dtype=torch.float32
                ).eval()
        except Exception as error:  # of any type: the package has none of its own for it
            reason = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise OnesweepError(f"transformers cannot read {source}: {reason}") from None
        self._cache: Any = None

    @property
    def vocabulary(self) -> int:
        return int(self._model.config.vocab_size)

    def begin(self) -> None:
        """Forget what was read."""
        self._cache = None

    @torch.inference_mode()
    def read(self, tokens: list[int]) -> Tensor:
        """Read on; logits (vocabulary,) of what follows."""
        out = self._model(torch.tensor([tokens]), past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        logits: Tensor = out.logits[0, -1]
        return logits
