"""Weights of 4 bits: imported as a GGUF file has them, batch-invariant, and small."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from serving.cli.__main__ import main
from stages.backends import Backend, onnx, packed_llama
from stages.backends.base import CleanPiece, StageRunner
from stages.backends.packed_llama import packed_stage
from stages.checkpoint.bundle import holds_copy
from stages.checkpoint.checkpoint import halve, load_stage
from stages.checkpoint.files import file_digest
from stages.checkpoint.gate import probe_tokens
from stages.checkpoint.inspect import record, verify
from stages.checkpoint.manifest import Manifest, read_manifest
from stages.errors import CheckpointError
from stages.host.parts import load_parts
from stages.host.plan import plan_host
from stages.importing.cut import stage_cost
from stages.importing.gguf_file import GgufSource
from stages.importing.importing import ImportSettings, import_model, summary
from stages.importing.source import ALL, is_matrix
from stages.model.architecture import GROUP, WEIGHT_WORDS, Weights
from stages.model.few_bits import GroupedLinear, Int8Linear, QuantLinear, quantised, rounded
from stages.model.llama import LlamaStage
from stages.model.pipeline import new_caches
from tests.stages.importing.large import write_large
from tests.stages.importing.published import SHAPE, fitted, taken_apart, write_folder, write_gguf

WIDE = replace(SHAPE, layers=(2,), head_dim=16)  # rows of all matrices are whole groups
LONG = replace(WIDE, width=256, head_dim=64, mlp_width=512)  # and of Q4_K, whole super-blocks
KINDS = ("Q4_0", "Q4_1")


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return fitted(WIDE)


@pytest.fixture(scope="module")
def made(weights: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of each kind of file, in float32 and as they are: `Q4_0 float32`, `Q4_0 q4` and so on."""
    found = {}
    for kind in KINDS:
        source = write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", weights, WIDE, matrices=kind)
        for stored in ("float32", "q4"):
            out = found[f"{kind} {stored}"] = source.parent / stored
            import_model(ImportSettings(source, out, 2, weights="float32" if stored == "float32" else None))
    return found


def stages(directory: Path) -> list[LlamaStage]:
    found = [load_stage(directory, i) for i in range(read_manifest(directory).architecture.parts)]
    assert all(isinstance(stage, LlamaStage) for stage in found)
    return found  # type: ignore[return-value]


def runners(directory: Path) -> list[StageRunner]:
    return [Backend().stage(stage) for stage in stages(directory)]


@torch.inference_mode()
def served_loss(directory: Path) -> float:
    """The loss of the probe text, as hosts compute it."""
    x = known = probe_tokens(read_manifest(directory))[0]
    served = runners(directory)
    for stage, runner in zip(stages(directory), served, strict=True):
        caches = new_caches(len(stage.layers), stage.architecture, len(known))
        x = runner.read([CleanPiece(x, caches)])[0]
    return float(F.cross_entropy(served[-1].next_byte([x])[0][:-1], known[1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_4_bit_file_is_imported_without_requantizing(made: dict[str, Path], kind: str) -> None:
    whole, small = stages(made[f"{kind} float32"]), stages(made[f"{kind} q4"])
    for expected, found in zip(whole, small, strict=True):
        modules = {name: module for name, module in found.named_modules() if isinstance(module, QuantLinear)}
        assert len(modules) == 4 * len(found.layers)
        for name, module in modules.items():
            assert torch.equal(module.dense(slice(None)), expected.get_submodule(name).weight), name
    assert all(check.ok for check in verify(made[f"{kind} q4"]))


@pytest.mark.parametrize("kind", KINDS)
def test_hosts_with_4_bit_weights_lose_less_than_a_fiftieth_of_a_nat(made: dict[str, Path], kind: str) -> None:
    losses = served_loss(made[f"{kind} float32"]), served_loss(made[f"{kind} q4"])
    assert abs(losses[0] - losses[1]) < 0.02


def test_a_host_frees_the_matrices_of_the_loaded_stage(made: dict[str, Path]) -> None:
    stage = stages(made["Q4_1 q4"])[1]
    packed_stage(stage)
    assert not any(module.codes.numel() for module in stage.modules() if isinstance(module, GroupedLinear))


def beside_float32(weights: dict[str, Tensor], directory: Path, stored: Weights) -> tuple[int, float]:
    """By how many bytes the files of a folder's stages are smaller than in float32, and how far the loss is from it."""
    source, kinds = write_folder(directory / "model", weights, WIDE), ("float32", stored)
    found = [import_model(ImportSettings(source, directory / kind, 2, weights=kind)) for kind in kinds]
    assert f"with {WEIGHT_WORDS[stored]}" in summary(found[1])
    assert all(check.ok for check in verify(directory / stored))
    whole, less = (sum(part.bytes for part in manifest.parts) for manifest in found)
    losses = [served_loss(directory / kind) for kind in kinds]
    return whole - less, abs(losses[0] - losses[1])


def test_bfloat16_takes_half_and_loses_almost_nothing(
    weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, error = beside_float32(weights, tmp_path, "bfloat16")
    matrices = sum(tensor.numel() for name, tensor in weights.items() if "layers" in name and tensor.dim() == 2)
    assert abs(saved - 2 * matrices) < 100
    assert 0 < error < 0.02
    monkeypatch.setattr(packed_llama, "MAX_HALF", 0.0)
    with pytest.raises(CheckpointError, match="values beyond 65504: import the model with --weights float32"):
        runners(tmp_path / "bfloat16")


def test_8_bits_take_a_quarter_and_lose_almost_nothing(
    weights: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, error = beside_float32(weights, tmp_path, "q8")
    matrices = [tensor for name, tensor in weights.items() if "layers" in name and tensor.dim() == 2]
    matrices += [weights["embedding.weight"]] * 2  # which is the head, too
    assert abs(saved - sum((4 - 1 - 2 / GROUP) * each.numel() for each in matrices)) < 2000
    assert 0 < error < 0.01
    assert record(tmp_path / "q8")["ar"]["parameters"] == record(tmp_path / "float32")["ar"]["parameters"]
    monkeypatch.setattr(onnx, "SCALE_ERROR", 0.0)
    onnx.min_rows.cache_clear()
    with pytest.raises(CheckpointError, match="multiplies 8-bit weights wrongly"):
        runners(tmp_path / "q8")


def test_rounding_8_bit_weights_again_gives_the_same_codes() -> None:
    linear = Int8Linear(96, 48, bias=False)
    linear.load_state_dict(rounded(torch.randn(48, 96, generator=torch.Generator().manual_seed(0))))
    assert all(torch.equal(each, getattr(linear, name)) for name, each in rounded(linear.dense(slice(None))).items())


def test_a_drafter_is_imported_if_its_tokens_match(
    weights: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, other = (write_folder(tmp_path / name, weights, WIDE) for name in ("model", "other"))
    tokens = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokens.replace("<extra_299>", "<another>"))
    ends = {name: torch.cat([x, x[-1:]]) for name, x in weights.items() if name in ("embedding.weight", "head.weight")}
    padded = write_folder(tmp_path / "padded", weights | ends, replace(WIDE, vocabulary=301))
    (padded / "tokenizer.json").write_text(tokens)
    drafters = {"copy:q8": "q8", "copy:q4": "q4", str(source): "q8"}
    odd = write_folder(tmp_path / "odd", taken_apart(LlamaStage(SHAPE, 0)))
    drafters |= dict.fromkeys((str(other), str(padded), "copy:q9", "", str(tmp_path), str(odd)), "")
    for i, (drafter, stored) in enumerate(drafters.items()):
        out = tmp_path / (f"{'with' if stored else 'without'} {i}")
        command = ["import", str(source), "--blocks", "2", "--out", str(out), "--drafter", drafter]
        assert main(command) == (0 if stored else 2)
        assert out.exists() == bool(stored), "a wrong drafter is refused before the model is read"
        if stored:
            plans = [plan_host(out, (block,)) for block in range(2)]
            assert [plan.draft_model for plan in plans] == [out / "local"] * 2
            assert read_manifest(out / "local").architecture.weights == stored
            first, last = (load_parts(plan).ar_drafter for plan in plans)
            assert first is None
            assert last.model is not None
    printed = capsys.readouterr().err
    assert file_digest(tmp_path / "with 0" / "tokenizer.json")[:12] in printed
    choices = "copy:q8, copy:q4, none, or give a smaller MODEL with the same tokens"
    assert f"--drafter 'copy:q9' is not a drafter (did you mean copy:q8 or copy:q4?); choose from {choices}" in printed
    assert f"--drafter '' is not a drafter; choose from {choices}" in printed
    assert f"drafter {tmp_path} cannot be imported: {tmp_path} is neither a Hugging Face folder (with" in printed
    assert f"drafter {odd} cannot be imported: architecture: rows of attention_out have 48 numbers" in printed
    assert (printed.count("this takes"), printed.count(" of the drafter\n")) == (3, 3), "one sum for both"
    assert "301 of tokenizer" in printed


def test_the_default_drafter_is_the_largest_copy_that_fits_the_last_host(
    weights: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, last = write_folder(tmp_path / "model", weights, WIDE), stage_cost(WIDE, 1, first=False, last=True)
    copies = [stage_cost(replace(WIDE, weights=kind), 2, first=True, last=True) for kind in ("q8", "q4")]
    for kind, spare in (("q8", copies[0].held), ("q4", copies[0].held - 1), ("", copies[1].held - 1)):
        out = tmp_path / f"with {kind}"
        rooms = f"10,{(last.held + spare) / 1e6!r}"
        assert main(["import", str(source), "--blocks", "2", "--out", str(out), "--memory-mb", rooms]) == 0
        assert (out / "local").exists() == bool(kind)
        assert not kind or read_manifest(out / "local").architecture.weights == kind
    missing = "copy:q4 does not fit the last host next to its stage: 0.0 MB are missing"
    assert f"the last host has no drafter: {missing}\n" in capsys.readouterr().err
    command = ["import", str(source), "--blocks", "2", "--out", str(tmp_path / "asked"), "--memory-mb", rooms]
    assert main([*command, "--drafter", "copy:q4"]) == 2
    assert missing in capsys.readouterr().err


def test_quantized_groups_have_less_error_than_equal_steps() -> None:
    weight = torch.randn(300, 96, generator=torch.Generator().manual_seed(0))  # more rows than are fitted at once
    weight[5] = 0.25
    weight[6] = 60_000 + weight[6].sign()  # far from zero, near each other
    grid = torch.cat([torch.arange(16), torch.arange(16)]).repeat(3) * 0.125 - 0.5
    weight[7] = grid  # held already
    linear = QuantLinear(96, 300, bias=False)
    linear.load_state_dict(quantised(weight))
    found, groups = linear.dense(slice(None)), weight.unflatten(1, (-1, GROUP))
    assert torch.equal(found[5], weight[5])
    assert torch.equal(found[7], weight[7])
    low, high = groups.aminmax(dim=2, keepdim=True)
    steps = ((groups - low) / (high - low).clamp(min=1e-9) * 15).round() * (high - low) / 15 + low
    least = (steps - groups).square().sum(2)
    errors = (found.unflatten(1, (-1, GROUP)) - groups).square().sum(2)
    kept = torch.arange(300) != 6  # float16 rounds its offsets by 16
    assert (errors <= least * 1.02 + 1e-6)[kept].all()
    assert errors[8:].sum() < 0.85 * least[8:].sum()
    assert (found[6] - weight[6]).abs().max() <= 16


def test_a_folder_is_imported_in_4_bits(
    weights: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_folder(tmp_path / "model", weights, WIDE), tmp_path / "out"
    assert main(["import", str(source), "--blocks", "2", "--out", str(out), "--weights", "q4"]) == 0
    assert "with 4-bit weights" in capsys.readouterr().out
    assert read_manifest(out / "local").architecture.weights == "q4", "the drafter, which is no larger than the model"
    whole = import_model(ImportSettings(source, tmp_path / "whole", 2))
    assert "4 bits" not in summary(whole)
    assert "weights" not in record(tmp_path / "whole")["ar"]["architecture"], "as in manifests of before"
    described = record(out)["ar"]
    assert described["architecture"]["weights"] == "q4"
    assert described["parameters"] == record(tmp_path / "whole")["ar"]["parameters"]
    halved = halve(out, tmp_path / "half")
    assert isinstance(halved, Manifest)
    assert all(check.ok for check in verify(tmp_path / "half"))


@pytest.mark.parametrize("kind", ["q4", "bfloat16"])
def test_values_too_large_for_fewer_bits_are_refused(weights: dict[str, Tensor], tmp_path: Path, kind: Weights) -> None:
    huge = {**weights, "layers.1.up.weight": weights["layers.1.up.weight"] * 1e8}
    source = write_folder(tmp_path / "huge", huge, WIDE)
    with pytest.raises(CheckpointError, match=r"up_proj.weight holds values (beyond 65504|that 4 bits with scales)"):
        import_model(ImportSettings(source, tmp_path / "out", 2, weights=kind, is_untrained=True))
    assert not (tmp_path / "out").exists()


def whole_blocks(path: Path, matrices: str | Callable[[str], str], a: Any = LONG) -> GgufSource:
    torch.manual_seed(0)
    return GgufSource(write_gguf(path, taken_apart(LlamaStage(a, 0)), a, matrices=matrices))


@pytest.mark.parametrize(
    ("matrices", "usual"),
    [
        ("Q4_K", "q4"),
        ("Q6_K", "q8"),
        (lambda name: "Q6_K" if name.endswith("v.weight") else "Q4_K", "q4"),
        (lambda name: "Q4_K" if name.endswith("v.weight") else "Q6_K", "q8"),
        ("F16", "float32"),
        (lambda name: "F32" if name.endswith("v.weight") else "Q4_K", "float32"),
    ],
)
def test_layers_keep_the_bits_of_the_file(matrices: str | Callable[[str], str], usual: Weights, tmp_path: Path) -> None:
    assert whole_blocks(tmp_path / "model.gguf", matrices).usual_weights() == usual


def test_a_q4_k_file_is_imported_up_to_float16_rounding(tmp_path: Path) -> None:
    source = whole_blocks(tmp_path / "model.gguf", "Q4_K")
    assert source.wide_matrices() == ()
    for name in (name for name, shape in source.shapes().items() if is_matrix(name, shape)):
        expected = source.tensor(name)  # by the package gguf
        linear = QuantLinear(expected.shape[1], expected.shape[0], bias=False)
        linear.load_state_dict(
            {part.rpartition(".")[2]: each for part, each in source.parts(name, replace(LONG, weights="q4")).items()}
        )
        errors, groups = (x.unflatten(1, (-1, GROUP)) for x in (linear.dense(slice(None)) - expected, expected))
        largest = torch.maximum(groups.amax(2) - groups.amin(2), groups.abs().amax(2))
        assert (errors.abs().amax(2) <= largest * 2**-10).all(), name


def test_an_embedding_is_read_in_slices_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 it may be larger than a stage in 4 bits: memory holds a layer's matrix, or less."""
    a, read, sizes = replace(LONG, vocabulary=1000), GgufSource.read, []

    def counted(source: GgufSource, name: str, rows: slice = ALL) -> Tensor:
        sizes.append((found := read(source, name, rows)).numel())
        return found

    monkeypatch.setattr(GgufSource, "read", counted)
    source = write_large(tmp_path / "model.gguf", a)
    manifest = import_model(ImportSettings(source, tmp_path / "out", 2, weights="q4", is_untrained=True))
    assert manifest.text_architecture.vocabulary == 1000
    assert max(sizes) == a.mlp_width * a.width


def test_matrices_with_more_than_4_bits_are_stored_in_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {"layers.1.v": "Q6_K", "layers.1.mlp_out": "Q6_K", "layers.0.v": "Q5_K", "layers.0.mlp_out": "Q8_0"}
    path = tmp_path / "model.gguf"
    whole_blocks(path, lambda name: kinds.get(name.removesuffix(".weight"), "Q4_K"))
    for stored in ("float32", "q4"):
        command = ["import", str(path), "--blocks", "2", "--out", str(tmp_path / stored), "--weights", stored]
        assert main([*command, "--drafter", "copy:q4", "--untrained"]) == 0
        line = "mlp_out, qkv have 8 bits: the file has more than 4 for some of them\n"
        assert (line in capsys.readouterr().err) == (stored == "q4")
        assert not read_manifest(tmp_path / stored / "local").architecture.eight_bits, "a copy is small"
        assert holds_copy(tmp_path / stored)
    whole = read_manifest(tmp_path / "q4").architecture
    for i, stage in enumerate(stages(tmp_path / "q4")):
        matrices = [each for each in stage.modules() if isinstance(each, GroupedLinear)]
        held = sum(tensor.nbytes for each in matrices for tensor in each.buffers())
        assert held == stage_cost(whole, 1, first=i == 0, last=i == 1).held
    for expected, found in zip(stages(tmp_path / "float32"), stages(tmp_path / "q4"), strict=True):
        for name, module in found.layers.named_modules():
            if isinstance(module, GroupedLinear):
                assert isinstance(module, Int8Linear) == name.endswith(("mlp_out", "qkv")), name
                errors = module.dense(slice(None)) - expected.layers.get_submodule(name).weight
                limit = 0.51 * module.scales.float() + 127 * 2**-25  # a small scale is off by half of float16's step
                if isinstance(module, QuantLinear):
                    limit += 2**-10 * module.offsets.float().abs()
                assert (errors.unflatten(1, (-1, GROUP)).abs().amax(2) <= limit).all(), name
    assert all(check.ok for check in verify(tmp_path / "q4"))
    assert abs(served_loss(tmp_path / "float32") - served_loss(tmp_path / "q4")) < 0.01
