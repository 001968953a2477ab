"""Makes tokenizer.json from a GGUF file's metadata."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.errors import CheckpointError, quoted
from stages.importing.speech import (
    DEFAULT,
    TEXT_ENDS,
    TURN_ENDS,
    Speech,
    is_mark,
    open_tokenizer,
    speech_of,
    with_rows,
)

# Sources, in llama.cpp: `load` of src/llama-vocab.cpp for tokenizers, `load_hparams` of src/llama-model.cpp and
# `load_arch_hparams` of src/models/ for the rest. Fields without a default there are required here, too.

# Token numbers by `tokenizer.ggml.model`; numbers beyond the vocabulary mean none, as does a `gpt2` token that is
# plain text: 11 is a comma in most vocabularies.
IDS = {"llama": {"bos": 1, "eos": 2, "unknown": 0}, "gpt2": {"bos": 11, "eos": 11}}
BEGINNING = {"llama", "llama-bpe"}  # tokenizer models, and ways of cutting, whose texts begin with a token
# Other names of a way of cutting.
SAME_PRETOKENIZER = dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), "llama-bpe")
SAME_PRETOKENIZER |= dict.fromkeys(("phi-2", "gigachat", "a.x-4.0", "mellum"), "gpt-2")
SAME_PRETOKENIZER |= dict.fromkeys(("deepseek-r1-qwen", "kormo", "megrez"), "qwen2")

# Defaults of the architecture's metadata, named without its prefix.
METADATA = {"rope.freq_base": 10000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 1.0}
OLDER_NAMES = {"rope.scaling.factor": "rope.scale_linear"}
# By `general.architecture`.
OF_ARCHITECTURE = {"gemma2": {"attention.sliding_window": 4096}}

# A GGUF file's statements about its tokens. They are checked before use, as the file comes from a user.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of tokens in `tokenizer.ggml.token_type`
SENTENCEPIECE = "llama"  # SentencePiece's name in `tokenizer.ggml.model`
TEMPLATE = "tokenizer.chat_template"  # also followed by a dot and the name of another one
# The publisher's settings, `general.sampling.`, by the names in a request.
SAMPLING_KEYS = {name: name for name in ("top_p", "top_k", "min_p")}
SAMPLING_KEYS |= {"temperature": "temp", "repetition_penalty": "penalty_repeat"}
SPACE = "▁"  # SentencePiece's space
ENDS = ("eos", "eot", "eom")  # tokens that end a text, by the names of their fields
NAMED = ("bos", "unknown", *ENDS)
_REMEDY = "put the model's own tokenizer.json next to the file"


@dataclass(frozen=True)
class GgufVocabulary:
    """A file's vocabulary. Arrays have an entry per token, or are empty if missing; each token has a kind."""

    model: str  # its algorithm: `gpt2`, `llama`, ..
    pre: str  # how text is cut before merging
    tokens: list[str]
    kinds: list[int]
    scores: list[float]
    merges: list[str]  # the two tokens of each, separated by a space, in order of priority
    numbers: dict[str, int | None]  # of the tokens in NAMED, by name; None if there is none
    begins: bool  # whether a text begins with `bos`
    is_prefixed: bool  # whether a space is put before a text
    changes_text: bool  # whether text is changed before it is cut, by tables or by removing spaces

    def text(self, name: str) -> str | None:
        """The text of one of NAMED; None if there is none."""
        number = self.numbers[name]
        return self.tokens[number] if number is not None and number < len(self.tokens) else None


def read_vocabulary(fields: Mapping[str, Any]) -> GgufVocabulary:
    """Read a file's metadata. Raises CheckpointError for a field of a type or size that the format does not allow."""
    reader = _FieldReader(fields)
    model = reader.one("model", str, "")
    are_pieces = model == SENTENCEPIECE
    tokens = reader.array("tokens", (str,), "strings")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]  # named as in llama.cpp
    token_types = reader.array("token_type", (int,), "whole numbers", len(tokens))
    kinds = token_types or [NORMAL] * len(tokens)
    scores = reader.array("scores", (float, int), "numbers", len(tokens))
    if any(math.isnan(score) for score in scores):
        raise CheckpointError("tokenizer.ggml.scores holds NaN: the file is damaged, fetch it again")
    if are_pieces:  # user-defined tokens are matched in the text as written
        spelled = zip(tokens, kinds, strict=True)
        tokens = [token.replace(SPACE, " ") if kind == USER_DEFINED else token for token, kind in spelled]
    default_ids = {name: i for name, i in IDS.get(model, {}).items() if are_pieces or kinds[i : i + 1] == [CONTROL]}
    given = {name: reader.number(name, len(tokens), default_ids.get(name)) for name in NAMED}
    # Tokens that end a text are matched as written, whatever kind the file gives them; if it gives no kinds, so are all
    # tokens with a special role.
    parts = NAMED if not token_types else ENDS
    template = str(fields.get(TEMPLATE, ""))
    marks = {number for name, number in given.items() if name in parts}
    marks |= {i for i, token in enumerate(tokens) if token in TURN_ENDS + TEXT_ENDS and is_mark(token, template)}
    kinds = [CONTROL if i in marks and kind != UNKNOWN else kind for i, kind in enumerate(kinds)]
    pre = reader.one("pre", str, "") or "default"
    begins = model in BEGINNING or SAME_PRETOKENIZER.get(pre, pre) in BEGINNING
    return GgufVocabulary(
        model,
        pre,
        tokens,
        kinds,
        scores,
        reader.array("merges", (str,), "strings"),
        given,
        reader.one("add_bos_token", bool, begins) and given["bos"] is not None,
        reader.one("add_space_prefix", bool, True),
        bool(fields.get("tokenizer.ggml.precompiled_charsmap")) or reader.one("remove_extra_whitespaces", bool, False),
    )


class _FieldReader:
    """Reads fields by the end of their names."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = fields

    def one(self, name: str, kind: type, default: Any) -> Any:  # noqa: ANN401
        found = self.fields.get(f"tokenizer.ggml.{name}", default)
        if not isinstance(found, kind):
            raise CheckpointError(f"tokenizer.ggml.{name} is {found!r:.60}: the file is damaged, fetch it again")
        return found

    def array(self, name: str, kinds: tuple[type, ...], what: str, size: int | None = None) -> list[Any]:
        """:param size: required size, unless the array is missing."""
        found = self.fields.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(found, list) or not all(type(each) in kinds for each in found):
            raise CheckpointError(f"tokenizer.ggml.{name} must hold {what}: the file is damaged, fetch it again")
        if found and size is not None and len(found) != size:
            raise CheckpointError(
                f"tokenizer.ggml.{name} has {len(found)} tokens, not {size}: the file is damaged, fetch it again"
            )
        return found

    def number(self, name: str, tokens: int, default: int | None) -> int | None:
        """A token's number; files write numbers out of range for none."""
        found = self.fields.get(f"tokenizer.ggml.{name}_token_id")
        if type(found) is int and found >= 0 and (found < tokens or not tokens):
            return found
        return default if default is not None and default < tokens else None


# Byte-level BPE, in the format of the package tokenizers.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# Ways of cutting text before merging, by `tokenizer.ggml.pre`; afterwards its bytes are written as letters.
SPLITS: dict[str, list[dict[str, Any]]] = {
    "smollm": [{"type": "Digits", "individual_digits": True}],
    "gpt-2": [],
    "llama-bpe": [_split(_LLAMA3)],
    # for example OLMo 2: cut as in Llama 3 (llama-vocab.cpp of llama.cpp), and merged without exception
    "dbrx": [_split(_LLAMA3)],
    "qwen2": [_split(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"))],
    # files older than `tokenizer.ggml.pre`: each expression cuts the pieces left by the ones before it
    "default": [
        _split(r"[\p{P}\$\+<=>\^~\|]+"),
        _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        _split(r"\p{N}+"),
        _split(r"[0-9][0-9][0-9]"),
    ],
}
_OWN_WORDS = ("smollm", "gpt-2")  # these leave the cutting into words to the last step


def byte_level(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The steps of its tokenizer.json. Raises CheckpointError for an unknown way of cutting."""
    pre = SAME_PRETOKENIZER.get(vocabulary.pre, vocabulary.pre)
    if pre not in SPLITS:
        raise CheckpointError(
            f"the tokenizer in this file ('gpt2', split as {pre!r}) cannot be rebuilt from it; those split as "
            f"{', '.join(SPLITS)} can: {_REMEDY}"
        )
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pre in _OWN_WORDS}
    return {
        "normalizer": {"type": "NFC"} if vocabulary.pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*SPLITS[pre], words]},
        "decoder": {**words, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(vocabulary.tokens)},
            "merges": [merge.split(" ", 1) for merge in vocabulary.merges],
            "ignore_merges": pre == "llama-bpe",
        },
    }


# SentencePiece's BPE, in the format of the package tokenizers: Llama 1 and 2, Mistral and their relatives.
MAX_CHARACTERS = 512  # of a token: each place in it is tried as a split
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]  # tokens that spell a character without a token of its own


def sentencepiece(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The steps of its tokenizer.json. Raises CheckpointError if the vocabulary does not determine them."""
    _check(vocabulary)
    numbers = {token: i for i, token in enumerate(vocabulary.tokens)}
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prefix = [{"type": "Prepend", "prepend": SPACE}] if vocabulary.is_prefixed else []
    read: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    read += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if vocabulary.is_prefixed:
        read.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": read},
        "model": {
            "type": "BPE",
            "unk_token": vocabulary.text("unknown"),
            "fuse_unk": True,
            "byte_fallback": numbers.keys() >= set(BYTES),
            "vocab": numbers,
            "merges": _merges(vocabulary),
        },
    }


def _merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Every way to make a token from two others, in order of priority.

    SentencePiece makes the token with the best score, and among several places for it the leftmost. A list of merges
    can express the first rule but not the second. The longer left side first comes closest, e.g. if " " or "  " fits.
    """
    kinds = zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True)
    scores = {token: score for token, kind, score in kinds if kind == NORMAL}
    if pairs := [tuple(merge.split(" ")) for merge in vocabulary.merges]:
        return [pair for pair in pairs if len(pair) == 2 and {*pair, "".join(pair)} <= scores.keys()]
    return [
        (token[:at], token[at:])
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        for at in range(len(token) - 1, 0, -1)
        if token[:at] in scores and token[at:] in scores
    ]


def _check(vocabulary: GgufVocabulary) -> None:
    tokens, kinds, scores = vocabulary.tokens, vocabulary.kinds, vocabulary.scores
    if not (tokens and scores):
        raise CheckpointError(
            "a SentencePiece tokenizer is rebuilt from tokenizer.ggml.tokens and scores, but one of them is not in "
            f"this file: {_REMEDY}"
        )
    if vocabulary.changes_text:
        raise CheckpointError(
            "the tokenizer in this file changes text before it splits it (precompiled_charsmap or "
            f"remove_extra_whitespaces), which cannot be rebuilt from a file: {_REMEDY}"
        )
    normal = [i for i, kind in enumerate(kinds) if kind == NORMAL]
    if any(scores[i] % 1 for i in normal):  # BPE scores number the merges, unigram scores are logarithms of frequencies
        raise CheckpointError(
            "tokenizer.ggml.scores are those of a unigram model, but only BPE can be rebuilt from such a file: "
            + _REMEDY
        )
    if long := next((i for i in normal if len(tokens[i]) > MAX_CHARACTERS), None):
        raise CheckpointError(f"damaged file: token {long} has {len(tokens[long])} characters, over {MAX_CHARACTERS}")
    if vocabulary.numbers["unknown"] is None and not set(BYTES) <= set(tokens):
        raise CheckpointError(f"this file has neither tokens for all bytes nor an unknown token: {_REMEDY}")


STEPS = {"gpt2": byte_level, SENTENCEPIECE: sentencepiece}  # by `tokenizer.ggml.model`


def gguf_speech(path: Path, fields: Mapping[str, Any], size: int) -> Speech:
    """A tokenizer next to the file takes precedence. Raises CheckpointError. size: of the model's vocabulary."""
    beside = path.parent / "tokenizer.json"
    vocabulary = read_vocabulary(fields)
    found = {name: x for name, x in fields.items() if name.startswith(TEMPLATE) and isinstance(x, str) and x}
    templates = {name.removeprefix(TEMPLATE).removeprefix(".") or DEFAULT: text for name, text in found.items()}
    tokenizer = with_rows(beside, size) if beside.is_file() else tokenizer_json(vocabulary)
    return speech_of(
        tokenizer,
        open_tokenizer(tokenizer),
        templates,
        {f"{name}_token": vocabulary.text(name) for name in ("bos", "eos")},
        {f"tokenizer.ggml.{name}_token_id": vocabulary.numbers[name] for name in ENDS},
        {name: fields.get(f"general.sampling.{theirs}") for name, theirs in SAMPLING_KEYS.items()},
        size,
        path.parent,
    )


def tokenizer_json(vocabulary: GgufVocabulary) -> str:
    """A tokenizer in the format of the package tokenizers. Raises CheckpointError."""
    if vocabulary.model not in STEPS:
        raise CheckpointError(
            f"the tokenizer in this file ({vocabulary.model!r}) cannot be rebuilt from it; those of "
            f"{', '.join(STEPS)} can: {_REMEDY}"
        )
    numbers = dict[str, int]()
    for i, token in enumerate(vocabulary.tokens):
        if (first := numbers.setdefault(token, i)) != i:
            raise CheckpointError(f"tokens {first} and {i} are both spelled {quoted(token)}: fetch the file again")
    whole: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": _added(vocabulary)}
    whole["post_processor"] = _beginning(vocabulary) if vocabulary.begins else None
    return json.dumps({**whole, **STEPS[vocabulary.model](vocabulary)})


def _added(vocabulary: GgufVocabulary) -> list[dict[str, Any]]:
    """Tokens that are matched before any merging; special ones are omitted when a text is decoded."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = (CONTROL, UNKNOWN) if vocabulary.model == SENTENCEPIECE else (CONTROL,)
    return [
        {"id": i, "content": vocabulary.tokens[i], "special": kind in special, **flags}
        for i, kind in enumerate(vocabulary.kinds)
        if kind in (*special, USER_DEFINED)
    ]


def _beginning(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """The step that puts the beginning token before a text."""
    bos = str(vocabulary.text("bos"))
    first, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {bos: {"id": bos, "ids": [vocabulary.numbers["bos"]], "tokens": [bos]}},
    }
