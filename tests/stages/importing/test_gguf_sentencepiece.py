"""A SentencePiece tokenizer out of a GGUF file cuts text as the library sentencepiece does."""

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.modes.pretrained_tokenizer import read_pretrained_tokenizer
from serving.modes.tokenizer import ChatPrompt, Message
from stages.checkpoint.gate import PROBE_TEXT
from stages.errors import CheckpointError
from stages.importing.gguf_tokenizer import read_vocabulary, tokenizer_json
from stages.importing.speech import open_tokenizer
from stages.model.llama import LlamaStage
from tests.stages.importing.published import SHAPE, taken_apart, write_gguf

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


def fields_of(model: Any, added: Sequence[str] = (), /, **metadata: Any) -> dict[str, Any]:
    """The metadata of a GGUF file; `metadata` goes before what the model has, None leaves out."""
    numbers = range(model.get_piece_size())
    tokens = [model.id_to_piece(i) for i in numbers]
    kinds = [4 if token in added else _kind(model, i) for i, token in enumerate(tokens)]
    found = {"model": "llama", "pre": "default", "tokens": tokens, "token_type": kinds}
    found |= {"scores": [model.get_score(i) for i in numbers], "add_bos_token": False, **metadata}
    return {f"tokenizer.ggml.{name}": value for name, value in found.items() if value is not None}


def _kind(model: Any, number: int) -> int:
    kinds = {2: model.is_unknown, 3: model.is_control, 5: model.is_unused, 6: model.is_byte}
    return next((kind for kind, holds in kinds.items() if holds(number)), 1)


def metadata_of(model: Any) -> dict[str, Any]:
    """The same by the ends of the writer's methods, with a chat template."""
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in fields_of(model).items()}
    metadata = {"tokenizer_model": "llama", "tokenizer_pre": "default", "token_list": fields["tokens"]}
    metadata |= {"token_scores": fields["scores"], "token_types": fields["token_type"], "add_space_prefix": True}
    return metadata | {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, "chat_template": TEMPLATE}


model = cache(trained)
HARD = [
    "",
    " ",
    "the sea",
    " the  sea   and    the ship ",
    "\n\nthe\n sea\r\n\t\n",
    "    if x:\n        return 12345 + 1.5e-7",
    "🚢🌊👩‍🚀 sea 🚢",
    "ß 漢字 עברית море\u00a0и\u3000корабль \ufffd",
    "e\u0301 \x00\x7f \ufeff",
    "▁the▁sea",
    "<0x41> <0x0A>",
    "the" * 200,
    "a" * 37,
]
LAST = 0x10FFFF
anything = st.lists(st.integers(0, LAST).filter(lambda code: not 0xD800 <= code < 0xE000).map(chr), max_size=20)
letters = st.text(st.sampled_from("thesandip  ▁12é€🚢\n"), max_size=40)


def rebuilt(fields: dict[str, Any]) -> Any:
    return open_tokenizer(tokenizer_json(read_vocabulary(fields)))


@cache
def usual() -> Any:
    return rebuilt(fields_of(model()))


@pytest.mark.parametrize(
    ("settings", "metadata"),
    [
        ({}, {}),
        ({}, {"token_type": None}),
        ({"add_dummy_prefix": False}, {"add_space_prefix": False}),
        ({"byte_fallback": False, "vocab_size": 160, "character_coverage": 0.98}, {}),
    ],
    ids=["as Llama's", "no kinds", "no space before", "unknown letters"],
)
def test_hard_texts_are_tokenized_like_sentencepiece(settings: dict[str, Any], metadata: dict[str, Any]) -> None:
    library, made = model(**settings), rebuilt(fields_of(model(**settings), **metadata))
    for text in HARD:
        expected = library.encode(text)
        assert made.encode(text).ids == expected, text
        if library.unk_id() not in expected:  # theirs is read as " ⁇ ", ours as nothing
            assert made.decode(expected) == library.decode(expected), text


@settings(deadline=None)
@given(st.one_of(letters, anything.map("".join)))
def test_any_text_is_tokenized_like_sentencepiece(text: str) -> None:
    assert usual().encode(text).ids == model().encode(text)
    assert usual().decode(model().encode(text)) == model().decode(model().encode(text)) == text.replace("▁", " ")


def test_merges_of_the_file_are_used() -> None:
    made = rebuilt(fields_of(model(), merges=["▁ t", "h e", "▁t he", "<s> t", "e no-such-token", "damaged"]))
    assert made.encode("the sea").tokens == ["▁the", "▁", "s", "e", "a"]


# Differences from sentencepiece, and why
def test_a_control_token_in_a_text_is_tokenized_as_one() -> None:
    """As for every model with a tokenizer.json: chat templates spell them in the text."""
    assert usual().encode("a</s>b").tokens == ["▁a", "</s>", "▁b"]
    assert "</s>" not in model().encode("a</s>b", out_type=str)
    assert usual().decode([1, *usual().encode("a").ids, 2]) == "a"


# From the file to the text
@pytest.mark.slow
def test_a_file_is_imported_with_its_tokenizer(imported: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    a = replace(SHAPE, layers=(2,), vocabulary=model().get_piece_size())
    path = write_gguf(tmp_path / "model.gguf", taken_apart(LlamaStage(a, 0)), a, metadata=metadata_of(model()))
    manifest = imported(path, is_untrained=True)
    spelling = read_pretrained_tokenizer(tmp_path / "out", manifest)
    tokens = spelling.vocabulary.tokens
    for text in HARD:
        assert tokens(spelling.encode_text(text.encode())) == [1, *model().encode(text)]
    prompt, _, _ = spelling.encode_chat(ChatPrompt([Message("user", "the sea 🚢")]))
    assert tokens(prompt) == [1, *model().encode("[user] the sea 🚢\n[assistant]")]
    assert spelling.ends == {2}
    reader = spelling.detokenizer(prompt)
    pieces = [reader.feed(spelling.vocabulary.encode([each])).decode() for each in [*model().encode("the 🌊s"), 2]]
    assert "".join(pieces) == " the 🌊s"
    assert pieces.count("") == 4, "three bytes of four, and the end"


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"scores": None}, "rebuilt from tokenizer.ggml.tokens and scores, but one of them is not in this file: put"),
        ({"scores": [0.0] * 7}, "tokenizer.ggml.scores has 7 tokens, not 420"),
        ({"scores": [float("nan")] * 420}, "tokenizer.ggml.scores holds NaN"),
        ({"scores": [-3.5] * 420}, "are those of a unigram model"),
        ({"token_type": ["1"] * 420}, "tokenizer.ggml.token_type must hold whole numbers"),
        ({"token_type": 1}, "tokenizer.ggml.token_type must hold whole numbers"),
        ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens must hold strings"),
        ({"tokens": ["a"] * 420}, "tokens 0 and 1 are both spelled 'a'"),
        ({"tokens": [*map(str, range(419)), "a" * 513]}, "token 419 has 513 characters, over 512"),
        ({"merges": [1]}, "tokenizer.ggml.merges must hold strings"),
        ({"model": 7}, "tokenizer.ggml.model is 7"),
        ({"model": "t5"}, r"the tokenizer in this file \('t5'\) cannot be rebuilt from it; those of gpt2, llama can"),
        ({"add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token is 'yes'"),
        ({"precompiled_charsmap": [1]}, "changes text before it splits it"),
        ({"remove_extra_whitespaces": True}, "changes text before it splits it"),
    ],
)
def test_an_invalid_tokenizer_is_refused(metadata: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        rebuilt(fields_of(model(), **metadata))
