"""A Hugging Face folder: config.json, safetensors with or without an index, tokenizer.json and the files next to it."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from stages.checkpoint.manifest import read_json as read_object
from stages.errors import CheckpointError, quoted
from stages.importing.families import family_named
from stages.importing.family import NORMS, refused_with
from stages.importing.source import ALL, Shape, Source, TensorNames, TensorPlace, places_of
from stages.importing.speech import DEFAULT, Speech, open_tokenizer, read_text, require_file, speech_of, with_rows
from stages.progress import counted

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_TOP = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_UNUSED = re.compile(r"\.rotary_emb\.inv_freq$")  # tables in old files, which are computed anyway


class HuggingFaceSource(Source):
    """Raises CheckpointError if the folder holds no supported model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = read_json(folder / "config.json")
        named = config.get("architectures") or [None]
        self.family = family_named(named[0] if isinstance(named, list) else named)
        if config.get("quantization_config"):
            raise CheckpointError(
                "quantised safetensors (quantization_config) are unsupported: import the model unquantised, or as GGUF"
            )
        with refused_with("config.json"):
            self.architecture = self.family.architecture(config)
        self._files = self._find()
        self.names = TensorNames("model.layers", _TOP, self.family.tensors)
        self.places = self._find_places()
        self.speech = folder_speech(folder, config, self.architecture.vocabulary)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "unknown")
        self.about = {"source": folder.resolve().name, "format": "safetensors", "dtype": dtype}

    def _find_places(self) -> dict[str, TensorPlace]:
        found: dict[str, Shape] = {}
        for file in sorted(set(self._files.values())):
            with self._open(file) as tensors:
                names = [name for name in tensors.keys() if not _UNUSED.search(name)]  # noqa: SIM118
                if unlisted := [name for name in names if name not in self._files]:
                    raise CheckpointError(f"{self.folder / INDEX} does not list {unlisted[0]}, which is in {file}")
                found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        return places_of(found, self.names, self.architecture)

    def read(self, name: str, rows: slice = ALL) -> Tensor:
        place = self.places[name]
        file, theirs = self._files[place.stored], place.stored
        with self._open(file) as tensors:
            try:
                tensor: Tensor = tensors.get_slice(theirs)[rows if place.part is None else place.part]
            except SafetensorError as error:
                raise CheckpointError(f"{self.folder / file}: tensor {theirs} cannot be read ({error})") from None
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{self.folder / file}: tensor {theirs} holds {str(tensor.dtype)[6:]}, not floating-point numbers"
            )
        tensor = tensor.to(torch.float32)
        is_norm = name.split(".")[-2] in NORMS
        return tensor + 1 if is_norm and self.family.offset_norms else tensor

    def _find(self) -> dict[str, str]:
        """The file of each stored tensor."""
        if (self.folder / INDEX).is_file():
            places = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(places, dict) or not all(_SHARD.fullmatch(str(file)) for file in places.values()):
                raise CheckpointError(f"{self.folder / INDEX} has no weight_map of files in the same folder")
            if missing := sorted({file for file in places.values() if not (self.folder / file).is_file()}):
                count = len(set(places.values()))
                raise CheckpointError(f"missing {len(missing)} of {counted(count, 'shard')}: {', '.join(missing[:8])}")
        elif (self.folder / SINGLE).is_file():
            with self._open(SINGLE) as tensors:
                places = dict.fromkeys(tensors.keys(), SINGLE)
        else:
            raise CheckpointError(
                f"{self.folder} has neither {SINGLE} nor {INDEX}: only safetensors are supported, not pickled weights"
            )
        return {name: file for name, file in places.items() if not _UNUSED.search(name)}

    def _open(self, file: str) -> Any:  # noqa: ANN401
        require_file(self.folder / file)
        try:
            return safe_open(self.folder / file, "pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / file} cannot be read ({error}); fetch it again") from None


# Names of tokens in tokenizer_config.json and special_tokens_map.json. Which file takes precedence follows the package
# `transformers` 5 (`_from_pretrained` of tokenization_utils_base.py). It ignores add_bos_token and add_eos_token if
# there is a tokenizer.json, whose post-processor decides how a text begins.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of the folder. Raises CheckpointError."""
    require_file(path)
    return read_object(path, max_bytes=64 << 20)


def folder_speech(folder: Path, config: Mapping[str, Any], vocabulary: int) -> Speech:
    """The speech of a folder. Raises CheckpointError. vocabulary: size of the model's."""
    read_json(folder / "tokenizer.json")  # reports any problem with it
    read = partial(_read_companion, folder)
    settings, added = read("tokenizer_config.json"), dict[str, Any]()
    if "added_tokens_decoder" not in settings:  # which an older version stored in two files
        settings, added = settings | read("special_tokens_map.json"), read("added_tokens.json")
    tokenizer, made = _completed(with_rows(folder / "tokenizer.json", vocabulary), settings, added, vocabulary)
    named = {name: _content(token) for name, token in _named(settings).items()}
    generation = read("generation_config.json")
    claims = {
        "generation_config.json": generation.get("eos_token_id"),
        "config.json": config.get("eos_token_id"),
        "eos_token": made.token_to_id(named.get("eos_token", "")),
    }
    templates = _templates(folder, settings)
    return speech_of(tokenizer, made, templates, named, claims, generation, vocabulary, folder)


def _completed(
    tokenizer: str, settings: Mapping[str, Any], added: Mapping[str, Any], vocabulary: int
) -> tuple[str, Tokenizer]:
    """tokenizer.json with the tokens that only other files name, and with the flags from there; unchanged if they add
    nothing. Raises CheckpointError."""
    made = open_tokenizer(tokenizer)
    known = {token.content: token.__getstate__() for token in made.get_added_tokens_decoder().values()}
    free = max([made.get_vocab_size(with_added_tokens=False) - 1, *made.get_added_tokens_decoder()]) + 1
    is_changed = False
    for number, token in _tokens(settings, added, known):
        is_new = made.token_to_id(token.content) is None
        if token.__getstate__() == known.get(token.content) or (is_new and free >= vocabulary):
            continue  # without a row in the model, it can be neither read nor written
        if is_new and number not in (None, free):
            raise CheckpointError(
                f"token {quoted(token.content)} should have number {number}, but after tokenizer.json it gets {free}: "
                "take all files of the tokenizer from one source"
            )
        made.add_tokens([token])
        free, is_changed = free + is_new, True
    return made.to_str() if is_changed else tokenizer, made


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens by their names in chat templates."""
    others = [name for name, token in settings.items() if name.endswith("_token") and isinstance(token, str)]
    found = {name: settings[name] for name in (*NAMED, *others) if _content(settings.get(name))}
    extra = settings.get("extra_special_tokens")
    return found | {_content(name): token for name, token in (extra if isinstance(extra, dict) else {}).items()}


def _tokens(
    settings: Mapping[str, Any], added: Mapping[str, Any], known: Mapping[str, Any]
) -> Iterator[tuple[int | None, AddedToken]]:
    """Tokens in the files next to tokenizer.json, in the order of their numbers, then those with a name but no
    number. Raises CheckpointError."""
    lists = [tokens for name in EXTRA if isinstance(tokens := settings.get(name), list)]
    special = [token for token in (*_named(settings).values(), *chain(*lists)) if _content(token)]
    decoder = settings.get("added_tokens_decoder")
    # among tokens with their own flags, only named ones become special; already special ones stay so
    controls = {_content(token) for token in (_named(settings).values() if decoder else special)}
    controls |= {name for name, flags in known.items() if flags["special"]}
    seen = set(known)
    try:
        pairs = decoder.items() if decoder else [(number, name) for name, number in added.items()]
        numbered = sorted((int(number), _content(token), token) for number, token in pairs)
    except (ValueError, TypeError, AttributeError):
        raise CheckpointError("added_tokens_decoder must name a token for each number: fetch the files again") from None
    for number, name, token in numbered:
        if name and (isinstance(token, dict) or name not in known):
            seen.add(name)
            yield number, _added_token(token, name in controls)
    for token in special:
        if (name := _content(token)) not in seen:
            seen.add(name)
            yield None, _added_token(token, is_special=True)


def _added_token(token: object, is_special: bool) -> AddedToken:
    """A token from its form in a file: its text, or an object with its flags."""
    flags_given = token if isinstance(token, dict) else {}
    is_special = is_special or flags_given.get("special") is True
    flags = {flag: flags_given[flag] for flag in FLAGS if isinstance(flags_given.get(flag), bool)}
    return AddedToken(_content(token), special=is_special, **{"normalized": not is_special, **flags})


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by their names. Separate files take precedence over the settings."""
    files = {DEFAULT: path} if (path := folder / "chat_template.jinja").is_file() else {}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if files:
        return {name: read_text(path) for name, path in files.items()}
    setting = settings.get("chat_template") or _read_companion(folder, "chat_template.json").get("chat_template")
    if isinstance(setting, list):
        setting = {_content(each.get("name")): each.get("template") for each in setting if isinstance(each, dict)}
    given = setting if isinstance(setting, dict) else {DEFAULT: setting}
    return {_content(name): template for name, template in given.items() if isinstance(template, str)}


def _read_companion(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}


def _content(token: object) -> str:
    """A token's text; empty if it is not a token."""
    content = token.get("content") if isinstance(token, dict) else token
    return content.encode(errors="replace").decode() if isinstance(content, str) else ""
