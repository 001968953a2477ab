"""Small SentencePiece models, and what a GGUF file says of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest

from stages.checkpoint.gate import PROBE_TEXT

TEXTS = [
    PROBE_TEXT,
    "the sea and the ship and the ship and the sea",
    "  if x:\n      return 12\n        else:\n    pass",
    "aaaaaaaa aaaa aaa aa a     b      c",
    "море и корабль",
    "été à la mer",
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"


def trained(added: Sequence[str] = (), texts: Sequence[str] = TEXTS, **settings: Any) -> Any:
    """A BPE model as Llama's was made, of a vocabulary of 420. Takes 0.2 s.

    :param added: tokens that are found before any merging; they come after <unk>, <s> and </s>.
    """
    library = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed: pip install sentencepiece")
    as_llama = {"byte_fallback": True, "split_digits": True, "allow_whitespace_only_pieces": True}
    as_llama |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
    model = io.BytesIO()
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        user_defined_symbols=list(added),
        num_threads=1,
        minloglevel=2,
        **{"vocab_size": 420, **as_llama, **settings},
    )
    return library.SentencePieceProcessor(model_proto=model.getvalue())


def fields_of(model: Any, added: Sequence[str] = (), /, **said: Any) -> dict[str, Any]:
    """The metadata of a GGUF file; `said` goes before what the model has, None leaves out."""
    numbers = range(model.get_piece_size())
    tokens = [model.id_to_piece(i) for i in numbers]
    kinds = [4 if token in added else _kind(model, i) for i, token in enumerate(tokens)]
    found = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds}
    found |= {"scores": [model.get_score(i) for i in numbers], "add_bos_token": False, **said}
    return {f"tokenizer.ggml.{name}": value for name, value in found.items() if value is not None}


def _kind(model: Any, number: int) -> int:
    kinds = {2: model.is_unknown, 3: model.is_control, 5: model.is_unused, 6: model.is_byte}
    return next((kind for kind, holds in kinds.items() if holds(number)), 1)


def describe(model: Any, writer: Any) -> None:
    """Writes it into a GGUF file, with a chat template."""
    fields = fields_of(model)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(fields["tokenizer.ggml.tokens"])
    writer.add_token_scores(fields["tokenizer.ggml.scores"])
    writer.add_token_types(fields["tokenizer.ggml.token_type"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(True)
    writer.add_chat_template(TEMPLATE)
