"""Check, as far as possible, that a tokenizer is the model's own; and the probe text in its tokens."""

from __future__ import annotations

from typing import Any

from stages.checkpoint.manifest import MAX_PROBE_TOKENS
from stages.errors import CheckpointError, InputError
from stages.model.llama import LlamaArchitecture

LEAST_SHARE = 0.85  # of the vocabulary that a tokenizer must know: models round theirs up, by less than this


def probe_tokens(tokenizer: str, architecture: LlamaArchitecture, text: str) -> tuple[int, ...]:
    """`text` in tokens.

    Raises CheckpointError for a tokenizer that cannot be the model's, InputError where its package is missing.
    """
    made = open_tokenizer(tokenizer)
    ids = made.get_vocab(with_added_tokens=True).values()
    size, vocabulary = len(ids), architecture.vocabulary
    if size == 0 or max(ids) >= vocabulary or size < LEAST_SHARE * vocabulary:
        raise CheckpointError(
            f"the tokenizer does not match: it knows {size} tokens, up to number {max(ids, default=-1)}, and the model "
            f"{vocabulary}: take the tokenizer.json that was published with these weights"
        )
    tokens = tuple(made.encode(text).ids[: min(architecture.positions, MAX_PROBE_TOKENS)])
    if len(tokens) < 2:
        raise CheckpointError(f"the tokenizer makes {len(tokens)} tokens of the probe text: it is none for text")
    return tokens


def open_tokenizer(tokenizer: str) -> Any:  # noqa: ANN401
    """The tokenizer that a tokenizer.json describes. Raises as `probe_tokens` does."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError("tokenizing needs the package tokenizers: pip install 'onesweep[pretrained]'") from None
    try:
        made = Tokenizer.from_str(tokenizer)
    except Exception as error:  # the package raises nothing more particular
        raise CheckpointError(f"tokenizer.json cannot be read ({error})") from None
    made.no_truncation()  # some were stored as they were set for a training
    made.no_padding()
    return made
