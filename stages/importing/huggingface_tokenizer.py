"""The tokenizer of a Hugging Face folder: tokenizer.json, and what the files beside it add."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from stages.checkpoint.manifest import read_json as read_object
from stages.errors import CheckpointError
from stages.importing.speech import DEFAULT, Speech, licence_texts, open_tokenizer, read_text, require_file, speech_of

# Names of tokens in tokenizer_config.json and special_tokens_map.json. What is taken of which file is what the package
# `transformers` 5 takes (`_from_pretrained` of tokenization_utils_base.py), which leaves add_bos_token and
# add_eos_token alone where there is a tokenizer.json: its post-processor says what a text begins with.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file of the folder. Raises CheckpointError."""
    require_file(path)
    return read_object(path, most_bytes=64 << 20)


def folder_speech(folder: Path, config: Mapping[str, Any], vocabulary: int) -> Speech:
    """Raises CheckpointError. vocabulary: size of the model's."""
    read_json(folder / "tokenizer.json")  # says what is wrong with it, if anything
    read = partial(_read_beside, folder)
    settings, added = read("tokenizer_config.json"), dict[str, Any]()
    if "added_tokens_decoder" not in settings:  # which an older version spread over two files
        settings, added = settings | read("special_tokens_map.json"), read("added_tokens.json")
    tokenizer, made = _completed(read_text(folder / "tokenizer.json"), settings, added, vocabulary)
    named = {name: _content(token) for name, token in _named(settings).items()}
    generation = read("generation_config.json")
    said = {
        "generation_config.json": generation.get("eos_token_id"),
        "config.json": config.get("eos_token_id"),
        "eos_token": made.token_to_id(named.get("eos_token", "")),
    }
    templates = _templates(folder, settings)
    return speech_of(tokenizer, made, templates, named, said, generation, vocabulary, licence_texts(folder))


def _completed(
    tokenizer: str, settings: Mapping[str, Any], added: Mapping[str, Any], vocabulary: int
) -> tuple[str, Tokenizer]:
    """tokenizer.json with the tokens that only other files name, and with the flags that these give; as it is where
    they say nothing new. Raises CheckpointError."""
    made = open_tokenizer(tokenizer)
    known = {token.content: token.__getstate__() for token in made.get_added_tokens_decoder().values()}
    free = max([made.get_vocab_size(with_added_tokens=False) - 1, *made.get_added_tokens_decoder()]) + 1
    is_changed = False
    for number, token in _tokens(settings, added, known):
        is_new = made.token_to_id(token.content) is None
        if token.__getstate__() == known.get(token.content) or (is_new and free >= vocabulary):
            continue  # what the model has no row for it can neither read nor write
        if is_new and number not in (None, free):
            raise CheckpointError(
                f"token {token.content[:40]!r} should have number {number}, and after tokenizer.json it gets {free}: "
                "take all files of the tokenizer from one place"
            )
        made.add_tokens([token])
        free, is_changed = free + is_new, True
    return made.to_str() if is_changed else tokenizer, made


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens by the names that chat templates have for them."""
    others = [name for name, token in settings.items() if name.endswith("_token") and isinstance(token, str)]
    found = {name: settings[name] for name in (*NAMED, *others) if _content(settings.get(name))}
    extra = settings.get("extra_special_tokens")
    return found | {_content(name): token for name, token in (extra if isinstance(extra, dict) else {}).items()}


def _tokens(
    settings: Mapping[str, Any], added: Mapping[str, Any], known: Mapping[str, Any]
) -> Iterator[tuple[int | None, AddedToken]]:
    """Tokens of the files beside tokenizer.json, in the order of their numbers, then those that have a name and no
    number. Raises CheckpointError."""
    lists = [tokens for name in EXTRA if isinstance(tokens := settings.get(name), list)]
    special = [token for token in (*_named(settings).values(), *chain(*lists)) if _content(token)]
    decoder = settings.get("added_tokens_decoder")
    # with flags of their own, only those that have a name become special; what is special already stays so
    controls = {_content(token) for token in (_named(settings).values() if decoder else special)}
    controls |= {name for name, flags in known.items() if flags["special"]}
    told = set(known)
    try:
        pairs = decoder.items() if decoder else [(number, name) for name, number in added.items()]
        numbered = sorted((int(number), _content(token), token) for number, token in pairs)
    except (ValueError, TypeError, AttributeError):
        raise CheckpointError("added_tokens_decoder must name a token for each number: fetch the files again") from None
    for number, name, token in numbered:
        if name and (isinstance(token, dict) or name not in known):
            told.add(name)
            yield number, _added_token(token, name in controls)
    for token in special:
        if (name := _content(token)) not in told:
            told.add(name)
            yield None, _added_token(token, is_special=True)


def _added_token(token: object, is_special: bool) -> AddedToken:
    """As a file has it: its text, or an object with its flags."""
    said = token if isinstance(token, dict) else {}
    is_special = is_special or said.get("special") is True
    flags = {flag: said[flag] for flag in FLAGS if isinstance(said.get(flag), bool)}
    return AddedToken(_content(token), special=is_special, **{"normalized": not is_special, **flags})


def _templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by their names. Files of their own go before the settings."""
    files = {DEFAULT: path} if (path := folder / "chat_template.jinja").is_file() else {}
    files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if files:
        return {name: read_text(path) for name, path in files.items()}
    setting = settings.get("chat_template") or _read_beside(folder, "chat_template.json").get("chat_template")
    if isinstance(setting, list):
        setting = {_content(each.get("name")): each.get("template") for each in setting if isinstance(each, dict)}
    given = setting if isinstance(setting, dict) else {DEFAULT: setting}
    return {_content(name): template for name, template in given.items() if isinstance(template, str)}


def _read_beside(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder / name) if (folder / name).is_file() else {}


def _content(token: object) -> str:
    """Its text; empty for what is no token."""
    content = token.get("content") if isinstance(token, dict) else token
    return content.encode(errors="replace").decode() if isinstance(content, str) else ""
