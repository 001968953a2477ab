"""Tokens, ends and templates of a folder are those that `transformers` finds in it, or refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stages.errors import CheckpointError
from stages.importing.huggingface import folder_speech
from stages.importing.importing import open_source
from stages.importing.speech import USUAL_SAMPLING, Speech, open_tokenizer
from tests.stages.importing.published import write_folder
from tests.stages.importing.test_parity import transformers
from tests.stages.model.tiny_llama import tiny_tokenizer

__all__ = ["transformers"]

# The tokenizer.json has 290 of the model's 300 tokens.
TEXTS = ["hi<|im_end|> x <|x|> y", " a [PAD] b<extra_257>  <|x|>z", "Z <extra_289>  <extra_258> "]
SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast"}
CONFIG = {"model_type": "llama", "eos_token_id": 257}
FLAGS = ("lstrip", "rstrip", "normalized", "special", "single_word")


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, content in {"config.json": CONFIG, "tokenizer.json": tiny_tokenizer(290), **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def speech(folder: Path, size: int = 300) -> Speech:
    return folder_speech(folder, json.loads((folder / "config.json").read_text()), size)


def beginning(bos: str) -> dict[str, Any]:
    parts = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {bos: {"id": bos, "ids": [256], "tokens": [bos]}}
    return {"type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": tokens}


flags = st.fixed_dictionaries({flag: st.booleans() for flag in FLAGS})
names = st.sampled_from(["<|im_end|>", "<|x|>", "<extra_257>", "<extra_289>", "Z"])
one = st.shared(flags, key="a token has one form in all files")
typed = one.map(lambda fields: {"__type": "AddedToken", "content": "[PAD]", **fields})
specials = st.dictionaries(
    st.sampled_from(["bos_token", "eos_token", "pad_token", "unk_token"]), st.none() | names | typed, max_size=3
)
decoders = st.builds(
    lambda first, new: (
        {"289": {"content": "<extra_289>", **first}}
        | {str(290 + i): {"content": name, **fields} for i, (name, fields) in enumerate(new.items())}
    ),
    flags,
    st.dictionaries(st.sampled_from(["<|im_end|>", "<|x|>", "[PAD]"]), flags, max_size=3),
)
bodies = st.sampled_from(["{{ messages }}", "{{ eos_token }}"])
templates = st.one_of(
    st.none(),
    bodies,
    st.dictionaries(st.sampled_from(["default", "tool_use", "rag"]), bodies, max_size=3).map(
        lambda found: [{"name": name, "template": body} for name, body in found.items()]
    ),
)
tokenizers = st.sampled_from([None, beginning("<extra_256>")]).map(
    lambda processor: json.loads(tiny_tokenizer(290)) | {"post_processor": processor}
)
configs = st.builds(
    lambda *parts: {name: value for part in parts for name, value in part.items()},
    st.just(SETTINGS),
    specials,
    st.fixed_dictionaries({}, optional={"added_tokens_decoder": decoders, "chat_template": templates}),
    st.fixed_dictionaries({}, optional={"add_bos_token": st.booleans(), "add_eos_token": st.booleans()}),
    st.fixed_dictionaries({}, optional={"additional_special_tokens": st.lists(names, unique=True, max_size=2)}),
)
folders = st.fixed_dictionaries(
    {"tokenizer.json": tokenizers},
    optional={
        "tokenizer_config.json": configs,
        "special_tokens_map.json": specials,
        "added_tokens.json": st.just({"<|x|>": 291, "<|im_end|>": 290}),
        "generation_config.json": st.fixed_dictionaries(
            {}, optional={"eos_token_id": st.sampled_from([None, 257, 11, 999, [257, 258]])}
        ),
        "chat_template.jinja": bodies,
        "additional_chat_templates/tool_use.jinja": bodies,
    },
)


@settings(deadline=None, max_examples=80)
@given(files=folders)
def test_folders_are_read_like_transformers(
    transformers: Any, tmp_path_factory: pytest.TempPathFactory, files: dict[str, Any]
) -> None:
    folder = write(tmp_path_factory.mktemp("folder"), files)
    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    named = theirs.chat_template if isinstance(theirs.chat_template, dict) else {"default": theirs.chat_template}
    named = {name: body for name, body in named.items() if body}
    if named and "default" not in named:
        with pytest.raises(CheckpointError, match="no chat template is named default"):
            speech(folder)
        return
    ours = speech(folder)
    made = open_tokenizer(ours.tokenizer)
    for text in TEXTS:
        tokens = theirs(text).input_ids
        assert made.encode(text).ids == tokens
        assert made.decode(tokens) == theirs.decode(tokens, skip_special_tokens=True)
    assert {name: token for name, token in ours.named.items() if token} == theirs.special_tokens_map
    assert {"default": ours.chat_template, "tool_use": ours.tool_template}.items() >= {
        name: body for name, body in named.items() if name != "rag"
    }.items()
    path = folder / "generation_config.json"
    where = transformers.GenerationConfig if path.is_file() else transformers.AutoConfig
    ends = where.from_pretrained(str(folder)).eos_token_id
    ends = {*(ends if isinstance(ends, list) else [ends]), theirs.eos_token_id}
    assert {end for end in ends if end is not None and end < 300} <= ours.ends.keys()


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({"generation_config.json": {"eos_token_id": None}}, {257}),
        ({"generation_config.json": {"eos_token_id": [258, 999]}}, {257, 258}),
        ({"config.json": {}, "tokenizer_config.json": {"eos_token": "<extra_259>"}}, {259}),
        ({"config.json": {}, "special_tokens_map.json": {"eos_token": {"content": "<|im_end|>"}}}, {290}),
        ({"tokenizer_config.json": {"additional_special_tokens": ["<|im_end|>", "</s>"]}}, {257, 290, 291}),
        ({"added_tokens.json": {"<|im_end|>": 290, "</s>": 291, "<EOT>": 292}}, {257, 290}),
        ({"added_tokens.json": {"<EOT>": 290}, "chat_template.jinja": "{{ messages }}<EOT>"}, {257, 290}),
        # a number of another vocabulary, where this one has plain text
        ({"config.json": {"eos_token_id": 2}, "generation_config.json": {"eos_token_id": 258}}, {258}),
        ({"config.json": {"eos_token_id": 2}}, {2}),
    ],
)
def test_end_tokens_come_from_all_files(tmp_path: Path, files: dict[str, Any], ends: set[int]) -> None:
    assert speech(write(tmp_path, files)).ends.keys() == ends


def test_an_import_reports_the_end_tokens(tmp_path: Path) -> None:
    files = {"tokenizer_config.json": {"eos_token": "<extra_257>", "pad_token": "<|im_end|>"}}
    assert speech(write(tmp_path / "some", files)).describe_ends() == (
        "texts end at <extra_257> (257: config.json, eos_token); <|im_end|> (290: the vocabulary)"
    )
    assert "texts run to the requested length" in speech(write(tmp_path / "none", {"config.json": {}})).describe_ends()


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (
            {"chat_template.jinja": "<|im_start|>{{ messages }}"},
            "writes <|im_start|>, which is not in the vocabul",
        ),
        ({"chat_template.jinja": "{{ messages }}<|eot_id|>"}, "writes <|eot_id|>, which is not in the"),
        (
            {"added_tokens.json": {"<|x|>": 295}},
            "token '<|x|>' should have number 295, but after tokenizer.json it gets",
        ),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"x": {}}}},
            "added_tokens_decoder must name a token for eac",
        ),
    ],
)
def test_files_of_two_models_are_refused(tmp_path: Path, files: dict[str, Any], sentence: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        speech(write(tmp_path, files))
    assert sentence in str(caught.value)


def test_a_token_without_an_embedding_row_stays_text(tmp_path: Path) -> None:
    folder = write(
        tmp_path, {"tokenizer_config.json": {"pad_token": "[PAD]"}, "chat_template.json": {"chat_template": "A"}}
    )
    ours = speech(folder, size=290)
    assert (ours.tokenizer, ours.chat_template) == (tiny_tokenizer(290), "A")


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "generation_config.json", "model.safetensors", "x.GGUF"]
)
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a pointer of Git LFS, not the file"),
        ("\n<!DOCTYPE html>\n<html>", "is a web page that was saved instead of the file"),
    ],
)
def test_a_git_lfs_pointer_or_a_web_page_is_refused(tmp_path: Path, name: str, content: str, sentence: str) -> None:
    folder = write_folder(tmp_path, {})
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"{name} {sentence}"):
        open_source(folder / name if name.endswith("GGUF") else folder).shapes()


@pytest.mark.parametrize(
    ("config", "sampling"),
    [
        ({"temperature": 0.6, "top_p": 0.9, "do_sample": True}, {"temperature": 0.6, "top_p": 0.9}),
        ({"temperature": 0.7, "top_k": 20}, {"temperature": 0.7, "top_k": 20}),
        ({"repetition_penalty": 1.1}, {**USUAL_SAMPLING, "repetition_penalty": 1.1}),
        ({"temperature": None, "top_k": 5000, "min_p": 2, "top_p": "0.9"}, USUAL_SAMPLING),
    ],
)
def test_the_publishers_sampling_settings_are_the_defaults(
    tmp_path: Path, config: dict[str, Any], sampling: dict[str, float]
) -> None:
    assert speech(write(tmp_path, {"generation_config.json": config})).sampling == sampling
