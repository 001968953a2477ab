"""The tokenizer from a model's checkpoint, and the chat template of a pretrained model."""

import codecs
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers

from serving.modes.chat_template import ChatTemplate, TemplateProblem
from serving.modes.tokenizer import BYTES_NAME, ChatPrompt, Detokenizer, EncodedChat, Tokenizer, Tokenizers
from serving.router.request import SETTINGS, SHAPES, bounds_problem
from stages.checkpoint.bundle import find_bundle
from stages.checkpoint.files import CHAT_TEMPLATE_NAME, SPECIALS_NAME, TOOL_TEMPLATE_NAME, read_companion
from stages.checkpoint.manifest import TOKENIZER_NAME, Manifest, read_manifest
from stages.errors import CheckpointError, library_errors
from stages.limits import MAX_ENDS
from stages.model.vocabulary import Vocabulary
from stages.wire.status import StatusError, failed_precondition, internal, invalid

# OpenAI's newer name of a role, and the name that templates know.
ROLES = {"developer": "system"}
SAMPLED = {f.name: f for f in SETTINGS if f.name == "temperature" or f.name in SHAPES}  # of a model's publisher
# Prompt tokens that decoding looks back at: the token before a word decides whether it begins with a space.
CONTEXT = 8
# Most tokens held back while no character is complete; after these they are handed out as they are.
MAX_HELD = 64
# Replaces bytes that are not a character, or not yet.
UNKNOWN = "\ufffd"


class PretrainedTokenizer(Tokenizer):
    """The tokens of one model."""

    noun = "tokens"

    def __init__(
        self,
        encoding: tokenizers.Tokenizer,
        vocabulary: Vocabulary,
        ends: frozenset[int] = frozenset(),
        template: ChatTemplate | None = None,
        id: str = "",
        tool_template: ChatTemplate | None = None,
    ) -> None:
        """:param id: as `Tokenizer.id`.

        :param tool_template: replaces `template` if there are tools and the model has one.
        """
        self.encoding, self.vocabulary, self.ends, self.template = encoding, vocabulary, ends, template
        self.tool_template = tool_template or template
        self.id, self.chats = id, template is not None
        self.max_token_bytes = max((len(token.encode()) for token in encoding.get_vocab()), default=1)
        normal: Callable[[str], str] = encoding.normalizer.normalize_str if encoding.normalizer else str
        added = encoding.get_added_tokens_decoder()
        found = {number: each for number, each in added.items() if each.special and len(each.content) > 1}
        # tokens matched in normalised text: other spellings of their names, such as wide letters, match too
        self._folded = {number for number, each in found.items() if normal is not str and each.normalized}
        names = [normal(each.content) if number in self._folded else each.content for number, each in found.items()]
        self._numbers = {each.content: number for number, each in added.items() if each.special}
        self._left_out = {*self._numbers.values()}
        self._normal, self._controls = normal, re.compile("|".join(map(re.escape, names)) or "(?!)")
        # tokens for one byte each, with which some tokenizers spell characters that have no token
        spelled = [encoding.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        numbers = [number for number in spelled if number is not None]
        has_fallback = numbers == spelled and encoding.decode([numbers[byte] for byte in "é".encode()]) == "é"
        self._spelled = numbers if has_fallback else []
        self._bytes = {number: byte for byte, number in enumerate(self._spelled)}

    def encode_text(self, text: bytes) -> bytes:
        return self._encode(text.decode(), specials=True)

    def encode_piece(self, text: str) -> bytes:
        return self._encode(text, specials=False)

    def encode_chat(self, chat: ChatPrompt) -> EncodedChat:
        messages, tools = chat.messages, chat.tools
        if (template := self.tool_template if tools else self.template) is None:
            raise failed_precondition("this model has no chat template: send a prompt instead of messages")
        shown = [{**each.more, "role": ROLES.get(each.role, each.role), "content": each.content} for each in messages]
        # control tokens in a user's text stay text: a placeholder for each goes through the template
        mark, found = secrets.token_hex(8), list[str]()
        # marks the end of the last message, after which templates write more
        end = secrets.token_hex(8) if chat.continues else ""
        shown[-1]["content"] += end

        def stand_in(match: re.Match[str]) -> str:
            found.append(match[0])
            return f"{mark}{len(found) - 1}{mark}"

        try:
            schema = template.call_schema(tools, chat.must_call, chat.answer)
            # `strict` is for the router: a template may print every field that it gets
            plain = [{name: value for name, value in each["function"].items() if name != "strict"} for each in tools]
            tools = [each | {"function": function} for each, function in zip(tools, plain, strict=True)]
            shown, tools = _in_strings([shown, tools], lambda text: self._controls.sub(stand_in, self._named(text)))
            text = template.render(shown, tools, not chat.continues)
            if end not in text:
                raise TemplateProblem(
                    "the model's chat template does not show the last message: it cannot be continued"
                )
        except TemplateProblem as problem:
            raise invalid(str(problem)) from None
        text = text[: text.rindex(end)] if end else text
        text += template.call_opening if chat.must_call else ""
        if not found:
            return EncodedChat(self._encode(text, specials=False), len(text.encode()), schema)
        pieces = re.split(f"{mark}([0-9]+){mark}", text)
        pieces[1::2] = [found[int(number)] for number in pieces[1::2]]
        tokens = b"".join(
            self._plain(each) if at % 2 else self._encode(each, specials=False) for at, each in enumerate(pieces)
        )
        return EncodedChat(tokens, len("".join(pieces).encode()), schema)

    def decode(self, tokens: Sequence[int]) -> str:
        """The tokens' text, without control tokens."""
        # for a byte that is not UTF-8 the library also replaces its neighbours with U+FFFD, and so loses letters
        read, kept = list[int](), (each for each in tokens if each not in self._left_out)
        for are_bytes, row in groupby(kept, self._bytes.__contains__):
            if are_bytes:
                repaired = bytes(self._bytes[token] for token in row).decode(errors="replace").encode()
                read += [self._spelled[byte] for byte in repaired]
            else:
                read += row
        text: str = self.encoding.decode(read)
        return text

    def hidden_tokens(self, names: Sequence[bytes]) -> frozenset[int]:
        return frozenset(self._numbers[name.decode()] for name in names if name.decode() in self._numbers)

    def token_text(self, token: int) -> bytes:
        # encode after another token: at the start, some tokenizers drop the space before a word
        before = self.encoding.encode("a", add_special_tokens=False).ids
        whole = self.encoding.decode([*before, token], skip_special_tokens=False)
        text: str = whole[len(self.encoding.decode(before, skip_special_tokens=False)) :]
        return text.encode() if UNKNOWN not in text else _bytes_of(self.encoding.id_to_token(token) or "")

    def detokenizer(self, prompt: bytes) -> Detokenizer:
        known = self.vocabulary.tokens(self.vocabulary.cut(prompt, max(self.vocabulary.count(prompt) - CONTEXT, 0)))
        return _Tokens(self, known)

    def _named(self, text: str) -> str:
        """A user's text, normalised if it holds a control token in another spelling than its name."""
        if not self._folded or self._folded.isdisjoint(self.vocabulary.tokens(self._encode(text, False))):
            return text
        with library_errors(_unreadable):
            return self._normal(text)

    def _plain(self, text: str) -> bytes:
        """A text in tokens without control tokens: their names are split in two before encoding."""
        tokens = b""
        while match := self._controls.search(text):
            tokens, text = tokens + self._encode(text[: match.start() + 1], False), text[match.start() + 1 :]
        return tokens + self._encode(text, False)

    def _encode(self, text: str, specials: bool) -> bytes:
        """:param specials: add the tokens that begin a text, if the tokenizer has such."""
        with library_errors(_unreadable):
            # as a batch: encoding a single text holds Python's lock, for seconds if a regular expression is slow
            (encoded,) = self.encoding.encode_batch([text], add_special_tokens=specials)
        return self.vocabulary.encode(encoded.ids)


def _unreadable(problem: str) -> StatusError:
    return invalid(f"the model's tokenizer fails on this text ({problem}): change the text, or replace the tokenizer")


def _in_strings(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401
    """A JSON value with its strings changed, except the names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _in_strings(each, change) for name, each in value.items()}
    return [_in_strings(each, change) for each in value] if isinstance(value, Sequence) else value


# The letters of bytes in byte-level tokens: printable bytes stand for themselves, others map to U+0100 and above.
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = sorted(set(range(256)) - set(_PRINTABLE))
LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


def _bytes_of(token: str) -> bytes:
    """The bytes of a token that splits a character: one byte by its number, or one letter per byte."""
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes.fromhex(token[3:5])
    return bytes(LETTERS[letter] for letter in token) if set(token) <= LETTERS.keys() else token.encode()


class _Tokens(Detokenizer):
    """Decodes each token as its addition to the text before it, once its end does not split a character."""

    def __init__(self, tokenizer: PretrainedTokenizer, prompt: list[int]) -> None:
        """:param prompt: the last tokens of the prompt."""
        self.tokenizer = tokenizer
        endings = (prompt[at:] for at in range(len(prompt)))
        # a start in the middle of a character would corrupt the text after it
        self._known = next((each for each in endings if UNKNOWN not in self._text(each)), [])
        self._held = list[int]()

    def feed(self, tokens: bytes) -> bytes:
        return "".join(self._text_after(token) for token in self.tokenizer.vocabulary.tokens(tokens)).encode()

    def end(self) -> bytes:
        held = b"".join(self.tokenizer.token_text(token) for token in self._held if self._text([token]))
        # everything except the start of a character that never ends
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(held)
        return (self._added().rstrip(UNKNOWN) + UNKNOWN * (len(text) - len(text.rstrip(UNKNOWN)))).encode()

    def _text_after(self, token: int) -> str:
        self._held.append(token)
        text = self._added()
        if text.endswith(UNKNOWN) and len(self._held) <= MAX_HELD:
            return ""
        self._known, self._held = self._held if text else (self._known + self._held)[-CONTEXT:], []
        return text

    def _added(self) -> str:
        return self._text(self._known + self._held)[len(self._text(self._known)) :]

    def _text(self, tokens: list[int]) -> str:
        with library_errors(lambda problem: internal(f"the model's tokenizer fails on the generated text: {problem}")):
            return self.tokenizer.decode(tokens)


def read_pretrained_tokenizer(directory: Path, manifest: Manifest) -> PretrainedTokenizer:
    """The tokenizer of the checkpoint in `directory`. Blocks. Raises CheckpointError for a missing or damaged file."""
    raw = read_companion(directory, manifest, TOKENIZER_NAME)
    with library_errors(lambda problem: CheckpointError(f"{directory / TOKENIZER_NAME} is not a tokenizer: {problem}")):
        tokenizer = tokenizers.Tokenizer.from_str(raw.decode())
        tokenizer.decode(tokenizer.encode("a").ids)  # some fail on any text
    size = manifest.text_architecture.vocabulary
    if (last := max(tokenizer.get_vocab().values(), default=0)) >= size:
        raise CheckpointError(
            f"the tokenizer of {directory} has a token {last}, the model {size} tokens: use its own tokenizer"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    named, ends, sampling = _specials(directory, manifest)
    template, tool_template = (
        ChatTemplate(read_companion(directory, manifest, name).decode(errors="replace"), named)
        if name in manifest.files
        else None
        for name in (CHAT_TEMPLATE_NAME, TOOL_TEMPLATE_NAME)
    )
    id = manifest.files[TOKENIZER_NAME]
    read = PretrainedTokenizer(tokenizer, Vocabulary(size), ends, template, id, tool_template)
    read.model_name, read.sampling = str(manifest.data.get("source", "")), sampling
    return read


def _specials(directory: Path, manifest: Manifest) -> tuple[dict[str, str], frozenset[int], dict[str, float]]:
    """Special tokens, namely those named in templates and those that end a text, and the publisher's sampling settings
    for requests that name none."""
    if SPECIALS_NAME not in manifest.files:
        return {}, frozenset(), {}
    try:
        record = json.loads(read_companion(directory, manifest, SPECIALS_NAME))
        named = {name: token for name, token in record.items() if name.endswith("_token") and token is not None}
        ends, most = record.get("end_tokens"), manifest.text_architecture.vocabulary
        if not all(isinstance(each, str) for each in named.values()) or not isinstance(ends or [], list):
            raise ValueError("its tokens must be strings, and end_tokens a list")
        if len(ends or []) > MAX_ENDS or not all(type(end) is int and 0 <= end < most for end in ends or []):
            raise ValueError(f"end_tokens must be at most {MAX_ENDS} whole numbers from 0 to {most - 1}")
        sampling = dict(record.get("sampling") or {})
        for name in sampling:
            if name not in SAMPLED or (problem := bounds_problem(SAMPLED[name], sampling[name])):
                raise ValueError(problem if name in SAMPLED else f"sampling has no setting {name!r}")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{directory / SPECIALS_NAME} is damaged: {error}") from None
    return named, frozenset(ends or []), sampling


def read_tokenizers(directory: Path) -> Tokenizers:
    """Read the tokenizers of a bundle's token models. Blocks. Raises OnesweepError for one missing or damaged."""
    of_tokens: dict[str, Tokenizer] = {}
    for path in find_bundle(directory).models.values():
        if (manifest := read_manifest(path)).tokenizer != BYTES_NAME:
            of_tokens[manifest.digest()] = read_pretrained_tokenizer(path, manifest)
    return Tokenizers(of_tokens)


def tokenizer_of(directory: Path) -> Tokenizer:
    """The tokenizer of a checkpoint. Raises OnesweepError if it is missing or damaged."""
    return read_tokenizers(directory).of(read_manifest(directory).digest())
