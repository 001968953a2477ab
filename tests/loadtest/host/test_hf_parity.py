"""`onesweep bench parity`: a small imported model over real hosts, one that was changed, and what is refused."""

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from onesweep.serving.cli.__main__ import main
from tests.stages.model.tiny_llama import tiny_tokenizer

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 300}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3}


def parity(checkpoint: Path, source: Path, *options: object) -> int:
    arguments: Sequence[object] = ("--checkpoint", checkpoint, "--source", source, *options)
    return main(["bench", "parity", *map(str, arguments)])


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source with random weights, and what `onesweep import` made of it."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import torch

    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("parity")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, eos_token_id=299))
    model.save_pretrained(root / "source")
    (root / "source" / "tokenizer.json").write_text(tiny_tokenizer(300))
    arguments = ["import", str(root / "source"), "--out", str(root / "imported"), "--blocks", "2", "--untrained"]
    assert main(arguments) == 0
    return root / "imported", root / "source"


def test_hosts_write_what_the_source_writes(
    imported: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert parity(*imported, "--prompts", 3, "--max-tokens", 8, "--json", tmp_path / "p.json") == 0
    record = json.loads((tmp_path / "p.json").read_text())
    assert record["holds"]
    assert [(p["same_text"], p["tokens"], p["same_tokens"]) for p in record["prompts"]] == [(True, 8, 8)] * 3
    assert all(0 < p["largest_difference"] < 1e-3 for p in record["prompts"])
    assert all(len(p["ours_ms"]) == len(p["theirs_ms"]) == 7 for p in record["prompts"])
    out = capsys.readouterr().out
    assert "24 of 24 tokens are the same" in out
    assert "3 of 3 texts of the hosts" in out
    assert "processor time for a token" in out


def test_drafts_change_no_text(imported: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "parity", "--checkpoint", str(imported[0]), "--prompts", "3", "--max-tokens", "12"]
    assert main([*command, "--json", str(tmp_path / "p.json")]) == 0
    record = json.loads((tmp_path / "p.json").read_text())
    rows = [(r["drafter"], r["temperature"], r["has_schema"], r["different"]) for r in record["rows"]]
    assert rows == [("lookup", t, schema, []) for t in (0.0, 0.7, 1.0) for schema in (False, True)]
    assert all(r["tokens"] <= r["ar_sweeps"] and r["texts"] == 3 for r in record["rows"])
    assert "3 of 3" in capsys.readouterr().out
    assert main([*command[:4], "--prompts", "600"]) == 2
    assert "--prompts must be 1 to 552, not 600" in capsys.readouterr().err


def test_another_model_is_not_the_same(
    imported: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, source = imported
    other = shutil.copytree(source, tmp_path / "source")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.0}))
    assert parity(checkpoint, other, "--prompts", 1, "--max-tokens", 4) == 1
    assert "not the same: 'The old man" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--prompts", 0), "--prompts must be 1 to 24, not 0"),
        (("--max-tokens", 200), "--max-tokens must be 1 to 85, what the context leaves after the prompt"),
        (("--json", "/nowhere/p.json"), "cannot write /nowhere/p.json"),
        (("--source", "/nowhere/model"), "no model at /nowhere/model"),
    ],
)
def test_refused_with_a_sentence(
    imported: tuple[Path, Path], capsys: pytest.CaptureFixture[str], options: tuple[object, ...], says: str
) -> None:
    assert parity(*imported, *options) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_model_of_bytes_was_not_imported(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert parity(bundle, tmp_path) == 2
    assert "has no imported model" in capsys.readouterr().err


def test_a_source_that_cannot_be_read_or_is_another(
    imported: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "onesweep.loadtest.host.parity.temporary_deployment", lambda *_: pytest.fail("hosts were started")
    )
    assert parity(imported[0], tmp_path) == 1
    assert f"transformers cannot read {tmp_path}: " in capsys.readouterr().err
    monkeypatch.setattr("onesweep.loadtest.host.parity.TransformersReference.vocabulary", 7)
    assert parity(*imported) == 2
    assert "has 7 tokens, " in capsys.readouterr().err


def test_transformers_is_missing(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onesweep.loadtest.host.parity.find_spec", lambda name: None)
    assert parity(bundle, tmp_path) == 2
    assert capsys.readouterr().err == (
        "onesweep: bench parity needs the package transformers: pip install 'onesweep[quality]'\n"
    )


def test_transformers_that_cannot_be_imported(
    imported: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onesweep.loadtest.host.parity.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert parity(*imported) == 2
    assert "onesweep: the package transformers does not work here: " in capsys.readouterr().err
