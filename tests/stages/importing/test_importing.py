"""Imports from a folder and from a GGUF file: the checkpoint, and refused sources."""

import hashlib
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from serving.cli.__main__ import main
from stages import memory
from stages.checkpoint.inspect import verify
from stages.checkpoint.manifest import read_manifest
from stages.checkpoint.release_store import ReleaseStore, read_release_manifest
from stages.errors import CheckpointError, InputError, StalePart
from stages.importing.cut import StageHost, cut, stage_cost
from stages.importing.importing import ImportSettings, import_model, open_source, write_own_part
from stages.importing.speech import USUAL_SAMPLING
from stages.model.architecture import LlamaArchitecture
from tests.stages.importing.published import SHAPE, write_folder, write_gguf

Weights = dict[str, Tensor]


@pytest.fixture
def folder(weights: Weights, tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", weights)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_becomes_a_checkpoint(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, templates = tmp_path / "out", [{"name": name, "template": name} for name in ("default", "tool_use")]
    edit(folder / "tokenizer_config.json", chat_template=templates)
    (folder / "generation_config.json").write_text('{"eos_token_id": [999], "min_p": 2, "top_p": null}')
    assert main(["import", str(folder), "--blocks", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "nats a token on the probe text" in printed.out
    assert "stage 1: 1 layer with the head" in printed.err
    assert "generation_config.json (the model has 300 tokens); min_p 2 (must be 0 to 1)\n" in printed.err
    assert "texts end at <extra_257> (257: config.json, eos_token)" in printed.err
    assert all(check.ok for check in verify(out))
    manifest = read_manifest(out)
    assert isinstance(manifest.architecture, LlamaArchitecture)
    assert manifest.architecture.layers == (2, 1)
    assert manifest.data == {"source": "model", "format": "safetensors", "dtype": "unknown"}
    names = {"tokenizer.json", "chat_template.jinja", "chat_template_tool_use.jinja", "special_tokens.json", "LICENSE"}
    assert manifest.files.keys() == names
    for name, digest in manifest.files.items():
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    assert json.loads((out / "special_tokens.json").read_text()) == {
        "bos_token": "<extra_256>",
        "eos_token": "<extra_257>",
        "end_tokens": [257],
        "sampling": USUAL_SAMPLING,
    }
    assert main(["inspect", str(out)]) == 0
    assert "rope_theta" in capsys.readouterr().out
    assert not list(tmp_path.glob(".out*")), "nothing is left beside it"


def test_shards_and_a_gguf_file_give_the_same_stages(imported: Any, weights: Weights, folder: Path, tmp_path) -> None:
    expected = imported(folder)
    whole = load_file(folder / "model.safetensors")
    names = sorted(whole)
    places = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: whole[name] for name in names if places[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert import_model(ImportSettings(folder, tmp_path / "shards", 2)).parts == expected.parts
    source = write_gguf(tmp_path / "model.gguf", weights)
    from_gguf = import_model(ImportSettings(source, tmp_path / "gguf", 2))
    assert from_gguf.architecture == expected.architecture
    assert from_gguf.parts == expected.parts
    (folder / "model-2-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing 1 of 2 shards: model-2-of-2.safetensors"):
        open_source(folder)


def test_a_machine_reads_its_stage_from_its_own_copy(
    imported: Any, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = imported(folder, 3)
    contents = read_release_manifest(tmp_path / "out")
    part = manifest.parts[1]
    (other := tmp_path / "other").mkdir()
    for source in (other, folder):
        store = ReleaseStore(tmp_path / f"of-{source.name}")
        store.own_copy = partial(write_own_part, source)
        intake = store.begin(contents, lambda _, index: index == 1)
        (asked,) = intake.requests
        path, _, begun = asked.partition("@")
        assert path == f"ar/{part.file}"
        raw = (tmp_path / "out" / part.file).read_bytes()
        assert (int(begun or 0) > 0) == (source == folder)
        assert (intake.incoming / path).exists() == (source == folder)
        intake.write(asked, raw[int(begun or 0) :])
        intake.finish()
        assert (store.path(contents.name) / path).read_bytes() == raw
    damaged = ReleaseStore(tmp_path / "damaged")
    end = len(raw) // 2
    damaged.own_copy = lambda directory, index, path: path.write_bytes(raw[: end - 1] + bytes([raw[end - 1] ^ 1]))
    intake = damaged.begin(contents, lambda _, index: index == 1)
    with pytest.raises(StalePart):
        intake.write(intake.requests[0], raw[end:])
    again = damaged.begin(contents, lambda _, index: index == 1)
    assert again.requests == [path], "it is sent then"
    again.write(path, raw)
    assert "the local copy is not of the model that is served; fetching the file" in caplog.text


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "architecture GemmaForCausalLM is not supported; supported: Llama"),
        ({"architectures": []}, "config.json names no model in `architectures`; supported: LlamaFor"),
        ({"mlp_bias": True}, "bias in the MLP"),
        ({"quantization_config": {"bits": 4}}, "quantised safetensors"),
        ({"intermediate_size": 64}, r"layers.0.mlp.gate_proj.weight has shape \(32, 32\), .* asks for \(64, 32\)"),
        ({"eos_token_id": list(range(100))}, "101 tokens end a text according to the files; the limit is 64"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight, which is missing"),
        ({"num_hidden_layers": 2}, r"does not use 9 tensors .*, starting with model.layers.2.input_layernorm.weight"),
        ({"rope_scaling": "x"}, "config.json cannot be read: rope_scaling must be an object of settings, not 'x'"),
        ({"hidden_size": "x"}, "hidden_size must be a number above 0, not 'x'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a number above 0, not 0"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 0}}, "rope_theta must be a number above 0, not 0"),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, "factor must be a number from 0.01 to 10000, not 'x'"),
        ({"vocab_size": 200}, r"model.embed_tokens.weight has shape \(300, 32\)"),
    ],
)
def test_an_unsupported_config_is_refused(imported: Any, folder: Path, config: dict[str, Any], sentence: str) -> None:
    edit(folder / "config.json", **config)
    with pytest.raises(CheckpointError, match=sentence):
        imported(folder)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        # the row of a token that the probe text does not have
        (
            lambda t: t["model.embed_tokens.weight"][299].fill_(math.nan),
            "embed_tokens.weight holds NaN or infinite numbers: fetch the model",
        ),
        (lambda t: t["lm_head.weight"].fill_(3e38), "on the probe text is not finite"),
        (lambda t: t.pop("lm_head.weight"), "tensor lm_head.weight, which is missing.* seems to be tied to the"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32).int()}), "norm.weight holds int32, not floating"),
    ],
)
def test_invalid_weights_are_refused(imported: Any, folder: Path, change: Any, sentence: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        imported(folder, is_untrained=True)


def test_wrong_options_are_refused_before_tensors_are_read(imported: Any, folder: Path, tmp_path, monkeypatch) -> None:
    with pytest.raises(InputError, match="--blocks 4: the model has 3 layers"):
        imported(folder, blocks=4)
    with pytest.raises(InputError, match=r"--context must be 2 to 256 for this model, not 300"):
        imported(folder, context=300)
    for name in ("nothing", "model/LICENSE", "."):
        with pytest.raises(InputError, match=r"neither a .* folder \(with config.json, .* nor a .gguf file"):
            imported(tmp_path / name)
    monkeypatch.setattr(memory, "free_memory", lambda: 1000)
    with pytest.raises(CheckpointError, match=r"not enough memory for importing .* MB needed, 0 MB free"):
        imported(folder)
    monkeypatch.undo()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(InputError, match="already exists"):
        imported(folder)
    link, long = tmp_path / "link", tmp_path / ("x" * 300)
    link.symlink_to("nowhere")
    with pytest.raises(InputError, match="already exists"):
        import_model(ImportSettings(folder, link, 2))
    with pytest.raises(InputError, match="as a directory: File name too long"):
        import_model(ImportSettings(folder, long, 2))


def test_a_tokenizer_of_another_model_is_refused(imported: Any, folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    few, damaged = {**tokenizer, "added_tokens": []}, {**tokenizer, "model": {}}
    begins = {
        "id": "<bos>",
        "ids": [300],
        "tokens": ["<bos>"],
    }  # that a post-processor writes
    pieces = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    adds = {"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {"<bos>": begins}}
    other, unknown = {**tokenizer, "post_processor": adds}, "does not match: it has 301 tokens, up to number 300"
    many = json.loads((folder / "tokenizer.json").read_text())
    small, mismatch = {**few, "model": {**few["model"], "vocab": {"a": 0, "b": 1}}}, "has 4 tokens, up to number 3, but"
    wrong = (damaged, "tokenizer.json cannot be read"), (small, f"does not match: it {mismatch}"), (other, unknown)
    for changed, sentence in wrong:
        (folder / "tokenizer.json").write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match=sentence):
            imported(folder)
    # Gemma 3 has such a token, without a row in the model
    many["added_tokens"].append({**many["added_tokens"][-1], "id": 300, "content": "<one too many>"})
    (folder / "tokenizer.json").write_text(json.dumps(many))
    imported(folder)
    assert json.loads((folder.parent / "out" / "tokenizer.json").read_text()) == tokenizer


@pytest.mark.parametrize(
    ("name", "content"),
    [("tokenizer_config.json", b'{"a": [5'), ("tokenizer.json", b"\xff"), ("the chat template", b"{% for")],
)
def test_damaged_json_or_template_is_refused(
    folder: Path, tmp_path: Path, capsys: Any, name: str, content: bytes
) -> None:
    (folder / name.replace("the chat template", "chat_template.jinja")).write_bytes(content)
    assert main(["import", str(folder), "--out", str(tmp_path / "out")]) == 1
    assert f"{name} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_damaged_files_are_refused(imported: Any, folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="cannot be read"):
        imported(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="not pickled weights"):
        imported(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        imported(folder)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(CheckpointError, match=r"x.gguf has version 0; use a file of version 2"):
        imported(tmp_path / "x.gguf")


def test_the_split_follows_the_bytes_read_in_a_step_and_speed_and_memory_of_the_hosts() -> None:
    whole, alike = LlamaArchitecture((30,), 576, 9, 3, 64, 1536, 8192, 49152), [StageHost()]
    assert (cut(whole, alike * 3), cut(whole, alike)) == ((12, 13, 5), (30,))
    assert (sum(cut(whole, alike * 30)), cut(SHAPE, alike * 3)) == (30, (1, 1, 1))
    fast = cut(whole, [StageHost(4.0), StageHost(), StageHost()])
    assert fast[0] > 2 * max(fast[1:])
    layer = stage_cost(whole, 1, first=False, last=False).held
    head = 4 * 49152 * 576
    tight = cut(whole, [StageHost(), StageHost(1.0, 5 * layer), StageHost()])
    assert tight[1] == 5
    with pytest.raises(InputError, match=r"take 651 MB, but the hosts have room for 300: 351 MB are missing"):
        cut(whole, [StageHost(1.0, 100e6)] * 3)
    with pytest.raises(
        InputError, match=r"no cut between layers fits each: a layer takes 14\.2 MB, with the embedding"
    ):
        cut(whole, [StageHost(1.0, head), StageHost(), StageHost()])


def test_the_split_is_shown_before_the_import(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["import", str(folder), "--blocks", "2", "--untrained", "--out", str(tmp_path / "out")]
    for arguments, message in (
        (["--speeds", "1,2,3"], "--speeds has 3 numbers for 2 stages: give one for each host"),
        (["--memory-mb", "0.001,0.001"], "MB are missing; add memory or hosts"),
        (["--speeds", "1,0"], "'1,0' is not a list of numbers above 0, such as 4,1,1"),
    ):
        assert main([*command, *arguments]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert main([*command, "--speeds", "2,1", "--memory-mb", "8,8"]) == 0
    printed = capsys.readouterr().err
    assert "stage 0: 2 layers with the embedding" in printed
    odd = "rows of attention_out have 48 numbers, but {}-bit weights need multiples of 32; bfloat16 and"
    assert "the last host has no drafter: copies have 8 or 4 bits, which need rows of a multiple of 32" in printed
    assert main([*command[:-1], str(tmp_path / "four"), "--weights", "q4"]) == 2
    assert odd.format(4) in capsys.readouterr().err
