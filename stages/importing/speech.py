"""Everything in a model besides its weights: tokenizer, chat templates, tokens that end a text, licences."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from stages.checkpoint.manifest import MAX_PROBE_TOKENS
from stages.errors import CheckpointError, file_errors, library_errors, printable, regular
from stages.limits import MAX_COUNT, MAX_ENDS, MAX_REPETITION_PENALTY, MAX_TEMPERATURE
from stages.model.architecture import LlamaArchitecture

# Tokens that end a text or a turn, by their names in any vocabulary. Source: `special_eog_ids` in llama-vocab.cpp
# of llama.cpp, except for unsupported families.
EOT = ("<EOT>", "[EOT]")
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<end_of_utterance>", *EOT)
TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>", "[EOS]")
TURN_STARTS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>")
DEFAULT, TOOL_USE = "default", "tool_use"  # names of chat templates: for any chat, and for one with tools

# Without a filter, one token in a hundred comes from the tail of a good model's distribution.
USUAL_SAMPLING = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (1e-6, 1),
    "top_k": (0, MAX_COUNT),
    "min_p": (0, 1),
    "repetition_penalty": (1e-6, MAX_REPETITION_PENALTY),
}


@dataclass(frozen=True)
class Speech:
    """Everything in a model besides its weights."""

    tokenizer: str  # tokenizer.json
    chat_template: str = ""
    tool_template: str = ""  # replaces the chat template if there are tools; empty: the chat template serves both
    named: Mapping[str, str | None] = field(default_factory=dict)  # `bos_token`, `eos_token` and their like, as text
    ends: Mapping[int, str] = field(default_factory=dict)  # a token that ends a text -> its name, and its sources
    # Default sampling settings of a request, by their names.
    sampling: Mapping[str, float] = field(default_factory=dict)
    licences: Mapping[str, bytes] = field(default_factory=dict)  # file name -> text
    ignored: Sequence[str] = ()  # invalid settings, as text for people

    def describe_ends(self) -> str:
        """A line about the ends, for people."""
        if not self.ends:
            return "no file names a token that ends a text: texts run to the requested length"
        return f"texts end at {'; '.join(self.ends.values())}"


def speech_of(
    tokenizer: str,
    made: Tokenizer,
    templates: Mapping[str, str],
    named: Mapping[str, str | None],
    claims: Mapping[str, object],
    sampling: Mapping[str, object],
    vocabulary: int,
    folder: Path,
) -> Speech:
    """Combine the files' statements.

    :param made: made from `tokenizer`.
    :param templates: by their names.
    :param claims: each source's statement about the end of a text, a number or a list of numbers. The first that states
        one is believed, the others only if they name no plain text.
    :param sampling: the publisher's settings, by the names in a request.
    :param vocabulary: size of the model's.
    :param folder: that has the licences.

    Raises CheckpointError if these cannot belong to one model.
    """
    if templates and DEFAULT not in templates:
        raise CheckpointError(
            f"no chat template is named {DEFAULT}, only {', '.join(sorted(templates))[:200]}: put the one for chats "
            "into chat_template.jinja"
        )
    template, tool_template = templates.get(DEFAULT, ""), templates.get(TOOL_USE, "")
    written = template + tool_template
    added = made.get_added_tokens_decoder()
    for names in (TURN_STARTS, TURN_ENDS + TEXT_ENDS):
        marks = [name for name in names if name in written]
        if marks and not any(made.token_to_id(mark) in added for mark in marks):
            raise CheckpointError(
                f"the chat template writes {marks[0]}, which is not in the vocabulary: the model would never see "
                "it; take the template or the tokenizer.json that was published with these weights"
            )
    numbers = {place: claim if isinstance(claim, list) else [claim] for place, claim in claims.items()}
    ignored = [
        f"eos_token_id {number!r:.40} of {place} (the model has {vocabulary} tokens)"
        for place, listed in numbers.items()
        for number in listed
        if number is not None and not (type(number) is int and 0 <= number < vocabulary)
    ]
    drawn = dict[str, float]()
    for name, (least, most) in SAMPLING_BOUNDS.items():
        value = sampling.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            drawn[name] = int(value) if name == "top_k" else float(value)
        elif value is not None:
            ignored.append(f"{name} {value!r:.40} (must be {least:g} to {most:g})")
    if drawn.get("top_k", 0) >= vocabulary:
        del drawn["top_k"]
    if not USUAL_SAMPLING.keys() & drawn.keys() and "top_k" not in drawn:  # nothing restricts the tokens to draw from
        drawn = USUAL_SAMPLING | drawn
    ends = _text_ends(numbers, made, written, vocabulary)
    return Speech(tokenizer, template, tool_template, named, ends, drawn, licence_texts(folder), ignored)


def _text_ends(claims: Mapping[str, list[Any]], made: Tokenizer, template: str, vocabulary: int) -> dict[int, str]:
    """The tokens that end a text, from all sources. Files write numbers beyond the vocabulary for none."""
    added = made.get_added_tokens_decoder()
    controls = {number for number, token in added.items() if token.special}
    found: dict[int, list[str]] = {}
    for place, listed in claims.items():
        numbers = [number for number in listed if type(number) is int and 0 <= number < vocabulary]
        # an unadapted configuration has numbers of another vocabulary, which are plain text in this one
        for number in [each for each in numbers if each in controls] if found else numbers:
            found.setdefault(number, []).append(place)
    for number, token in added.items():
        is_end = token.content in TURN_ENDS + TEXT_ENDS and number < vocabulary
        if is_end and (token.special or is_mark(token.content, template)):
            found.setdefault(number, ["the vocabulary"])
    if len(found) > MAX_ENDS:
        raise CheckpointError(f"{len(found)} tokens end a text according to the files; the limit is {MAX_ENDS}")
    names = {number: printable(made.id_to_token(number) or "") for number in sorted(found)}
    return {number: f"{name} ({number}: {', '.join(found[number])})" for number, name in names.items()}


def is_mark(name: str, template: str) -> bool:
    """True if the name of an end is not plain text, as `</s>` is in some vocabularies: an HTML tag."""
    return name.startswith(("<|", "<｜")) or name in template


def read_text(path: Path) -> str:
    """The text of a file. Raises CheckpointError."""
    require_file(path)
    try:
        with file_errors(CheckpointError, f"cannot read {path}"):
            return regular(path).read_text(encoding="utf-8")
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error}); fetch it again") from None


def require_file(path: Path) -> None:
    """Raise CheckpointError if a download left something else in place of a file."""
    beginning = first_bytes(path).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if beginning.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{path} is a pointer of Git LFS, not the file: fetch that with `git lfs pull`")
    if beginning.startswith((b"<!doctype html", b"<html")):
        raise CheckpointError(f"{path} is a web page that was saved instead of the file: download the file itself")


def first_bytes(path: Path) -> bytes:
    """First bytes of a file; empty if there is no file. Raises CheckpointError."""
    if not path.is_file():
        return b""
    with file_errors(CheckpointError, f"cannot read {path}"), path.open("rb") as file:
        return file.read(512)


# The texts that must accompany a model.
_NAME = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY|ACCEPTABLE_USE)([._-][A-Za-z0-9._-]*)?", re.IGNORECASE)
MAX_TEXTS = 8
MAX_TEXT_BYTES = 1 << 20


def licence_texts(folder: Path) -> dict[str, bytes]:
    """Licences in a folder: file name -> text."""
    paths = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_file())
    return {path.name: path.read_bytes() for path in paths[:MAX_TEXTS] if path.stat().st_size <= MAX_TEXT_BYTES}


MIN_SHARE = 0.85  # share of the vocabulary that a tokenizer must know: models round theirs up, but by less


def probe_tokens(tokenizer: str, architecture: LlamaArchitecture, text: str) -> tuple[int, ...]:
    """`text` in tokens. Raises CheckpointError for a tokenizer that cannot be the model's."""
    made = open_tokenizer(tokenizer)
    with library_errors(lambda problem: CheckpointError(f"the tokenizer fails on the probe text ({problem})")):
        written = made.encode(text).ids
    ids = {*made.get_vocab(with_added_tokens=True).values(), *written}  # a post-processor may add others
    size, vocabulary = len(ids), architecture.vocabulary
    if size == 0 or max(ids) >= vocabulary or size < MIN_SHARE * vocabulary:
        raise CheckpointError(
            f"the tokenizer does not match: it has {size} tokens, up to number {max(ids, default=-1)}, but the model "
            f"{vocabulary}: take the tokenizer.json that was published with these weights"
        )
    tokens = tuple(written[: min(architecture.positions, MAX_PROBE_TOKENS)])
    if len(tokens) < 2:
        raise CheckpointError(f"the tokenizer makes {len(tokens)} tokens of the probe text: it is not one for text")
    return tokens


def with_rows(path: Path, vocabulary: int) -> str:
    """A tokenizer.json without the added tokens beyond the model's vocabulary: without a row, none can be read or
    written. Raises CheckpointError."""
    text = read_text(path)
    if max(open_tokenizer(text).get_added_tokens_decoder(), default=0) < vocabulary:
        return text
    whole = json.loads(text)
    return json.dumps({**whole, "added_tokens": [each for each in whole["added_tokens"] if each["id"] < vocabulary]})


def open_tokenizer(tokenizer: str) -> Any:  # noqa: ANN401
    """The tokenizer that a tokenizer.json describes. Raises as `probe_tokens` does."""
    with library_errors(lambda problem: CheckpointError(f"tokenizer.json cannot be read ({problem})")):
        made = Tokenizer.from_str(tokenizer)
    made.no_truncation()  # some were stored with settings for training
    made.no_padding()
    return made
