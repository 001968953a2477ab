"""An import from beginning to end: identify the source, check it, cut it, and write it stage by stage."""

import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from stages.checkpoint.checkpoint import save_part, write_manifest, write_weights
from stages.checkpoint.files import CHAT_TEMPLATE_NAME, SPECIALS_NAME, TOOL_TEMPLATE_NAME, new_directory, require_new
from stages.checkpoint.gate import PROBE_TEXT, probe_shapes
from stages.checkpoint.gate import probe_tokens as stored_probe
from stages.checkpoint.manifest import TOKENIZER_NAME, Manifest, read_manifest
from stages.errors import CheckpointError, InputError, ShapeError, exists, one_of
from stages.importing.cut import MEGABYTE, NUMBER_BYTES, StageHost, cut, stage_cost, stage_costs, stage_lines
from stages.importing.gate import check_loss, layer_tensors, one_thread_each
from stages.importing.gguf_file import GgufSource
from stages.importing.huggingface import HuggingFaceSource
from stages.importing.source import EMBEDDING, HEAD, NORM, Source, expected_shapes, is_matrix
from stages.importing.speech import Speech, first_bytes, probe_tokens, require_file
from stages.memory import require_memory, return_large_buffers, trim
from stages.model.architecture import GROUP, WEIGHT_WORDS, LlamaArchitecture, Weights
from stages.model.llama import LlamaStage
from stages.model.pipeline import on_meta_device
from stages.progress import ProgressLine, counted

UNTRAINED_TOLERANCE = 0.1  # rounding affects random weights more: 11 layers of 4,096 numbers by 0.079 in 4 bits
COPIES: dict[str, Weights] = {"copy:q8": "q8", "copy:q4": "q4"}
DEFAULT_CONTEXT = 8192  # positions kept of a longer context: hosts hold a rotary table of its size
TEMPORARIES = 3  # times the largest tensor, held next to a stage during its assembly
SPARE_BYTES = 64 << 20  # of the disk, for files next to the weights, and for other programs; of memory, for libraries
CHECKING = 0.55  # the gate's share of the time; the rest is writing


@dataclass(frozen=True)
class ImportSettings:
    source: Path  # a Hugging Face folder, or a .gguf file
    out: Path
    blocks: int
    context: int | None = None  # positions to keep; None for the model's own, up to DEFAULT_CONTEXT
    is_untrained: bool = False
    hosts: Sequence[StageHost] = ()  # one for each stage; empty: equal hosts with unlimited room
    weights: Weights | None = None  # of the matrices in layers; None for those in the files
    loss_nats: float | None = None  # on the probe, if this source was read before
    is_drafter: bool = False  # small rather than exact
    # The last host's drafter: one of COPIES, the path of a smaller model with the same tokens, or `none`. None for
    # the largest copy that fits on the last host.
    drafter: str | None = "none"
    check_template: Callable[[str], object] | None = None  # raises CheckpointError for an invalid chat template


def open_source(path: Path) -> Source:
    """Open a source by its kind. Raises InputError or CheckpointError."""
    if exists(path / "config.json"):
        return HuggingFaceSource(path)
    require_file(path)
    # a hub's own copy of a file has no suffix
    if path.is_file() and (path.suffix.lower() == ".gguf" or first_bytes(path).startswith(b"GGUF")):
        return GgufSource(path)
    folder = "a Hugging Face folder (with config.json, tokenizer.json, *.safetensors)"
    raise InputError(f"{path} is neither {folder} nor a .gguf file")


# The model is read twice: layer by layer to measure its loss and the loss of some fifteen other readings of the same
# tensors, then stage by stage to write. Memory stays near one stage, and a mis-mapped model is refused, with the cause,
# before anything is written.
def import_model(settings: ImportSettings, progress: ProgressLine | None = None) -> Manifest:
    """Make the checkpoint. Raises InputError or CheckpointError, and then leaves nothing behind, or a complete
    checkpoint if only the drafter cannot be made."""
    progress = progress or ProgressLine(io.StringIO())  # which nobody sees
    return_large_buffers()  # each layer's tensors are as large as those of the layer before
    require_new(settings.out)
    progress.at(f"reading {settings.source}", 0.0)
    source = open_source(settings.source)
    source.check()
    if check := settings.check_template:
        for template in filter(None, (source.speech.chat_template, source.speech.tool_template)):
            check(template)
    settings = replace(settings, weights=settings.weights or source.usual_weights())
    wide = source.wide_matrices() if settings.weights == "q4" and not settings.is_drafter else ()
    architecture = _cut(replace(source.architecture, eight_bits=wide), settings)
    drafter, near = _chosen_drafter(source, architecture, settings)
    tokens = probe_tokens(source.speech.tokenizer, source.architecture, PROBE_TEXT)  # a short context tells too little
    layers, drafter_bytes = architecture.total_layers, stage_costs(near)[0].held if near else 0
    memory = max(_needed(architecture), _needed(near) if near else 0)
    disk = sum(cost.held for cost in stage_costs(architecture)) + drafter_bytes
    if not settings.is_drafter:  # the model's lines include it
        progress.say(
            f"{settings.source.name}: {counted(layers, 'layer')}; this takes {disk / MEGABYTE:.0f} MB of disk and "
            f"{memory / MEGABYTE:.0f} MB of memory"
        )
        for line in (*stage_lines(architecture, drafter_bytes), source.speech.describe_ends()):
            progress.say(line)
        if source.speech.ignored:
            progress.say(f"ignored, because not valid: {'; '.join(source.speech.ignored)}")
        sampling = ", ".join(f"{name} {value:g}" for name, value in source.speech.sampling.items())
        progress.say(f"sampling, unless a request sets it: {sampling}")
    if architecture.eight_bits:
        progress.say(f"{', '.join(architecture.eight_bits)} have 8 bits: the file has more than 4 for some of them")
    if settings.drafter is None:
        progress.say(f"the last host drafts with: {drafter}" if near else drafter)
    require_memory(memory, f"importing {settings.source}")
    _require_disk(disk, settings.out)
    if (nats := settings.loss_nats) is None:

        def checking(done: int) -> None:
            progress.at(f"checking layer {done + 1} of {layers}", CHECKING * done / layers)

        nats = check_loss(source, tokens, settings.is_untrained, checking)
    with new_directory(settings.out) as directory:
        files = _write_files(directory, source.speech)
        nothing = (None,) * architecture.parts
        data, metrics = {**source.about}, {"probe": {"next_token_nats": nats}}
        manifest = Manifest("ar", architecture, nothing, probe_text=PROBE_TEXT, tokenizer="tokens", data=data)
        tolerance = UNTRAINED_TOLERANCE if settings.is_untrained else manifest.probe_tolerance
        manifest = replace(manifest, metrics=metrics, probe_tokens=tokens, files=files, probe_tolerance=tolerance)
        write_manifest(directory, manifest)
        hidden = None
        for index in range(architecture.parts):
            share = sum(architecture.layers[:index]) / layers
            progress.at(f"writing stage {index + 1} of {architecture.parts}", CHECKING + (1 - CHECKING) * share)
            trim()  # memory left from the gate, or from the stage before
            stage = build_stage(source, architecture, index)
            with one_thread_each():
                hidden = save_part(directory, stage, hidden)
            del stage
        progress.close()
    if near is not None:
        beside = replace(settings, out=settings.out / "local", blocks=1, hosts=(), is_drafter=True, drafter="none")
        known = {"loss_nats": nats} if drafter in COPIES else {"source": Path(drafter)}
        try:
            import_model(replace(beside, weights=near.weights, check_template=None, **known), progress)
        except (InputError, CheckpointError) as error:
            raise type(error)(f"{error}; {settings.out} is imported without a drafter") from None
    return read_manifest(settings.out)


def _chosen_drafter(
    source: Source, architecture: LlamaArchitecture, settings: ImportSettings
) -> tuple[str, LlamaArchitecture | None]:
    """The last host's drafter and its architecture in one stage; or, if none is requested and none is possible, a line
    that says why. architecture: cut."""
    if (given := settings.drafter) is not None:
        return given, _drafter_architecture(source, architecture, settings, given)
    problem = ""
    # for a 4-bit model, an 8-bit drafter would be slower than the model itself
    for name in ("copy:q4",) if settings.weights == "q4" else COPIES:
        try:
            return name, _drafter_architecture(source, architecture, settings, name)
        except InputError as error:
            problem = str(error)
    return f"the last host has no drafter: {problem}", None


def _drafter_architecture(
    source: Source, architecture: LlamaArchitecture, settings: ImportSettings, drafter: str
) -> LlamaArchitecture | None:
    """The drafter's architecture in one stage. Raises InputError, before any weights are read."""
    if drafter == "none":
        return None
    if not drafter or (drafter.startswith("copy:") and drafter not in COPIES):
        known = one_of(drafter, [*COPIES, "none"])
        raise InputError(f"--drafter {drafter!r} is not a drafter{known}, or give a smaller MODEL with the same tokens")
    model = source
    try:
        if drafter not in COPIES:
            model = open_source(Path(drafter))
            model.check()
        kind = COPIES.get(drafter, "q8")
        near = _cut(model.architecture, replace(settings, blocks=1, hosts=(), weights=kind))
    except (InputError, CheckpointError) as error:
        if settings.drafter is None:  # a copy, with which nothing else can be wrong
            raise InputError(f"copies have 8 or 4 bits, which need rows of a multiple of {GROUP} numbers") from None
        other = "; drafters have 8 or 4 bits: give another MODEL, or none" if isinstance(error, ShapeError) else ""
        raise InputError(f"drafter {drafter} cannot be imported: {error}{other}") from None
    if (theirs := _tokens(model)) != (ours := _tokens(source)):
        raise InputError(f"drafter {drafter} has other tokens ({theirs}; the model has {ours}): give one of its family")
    room = settings.hosts[-1].memory_bytes if settings.hosts else math.inf
    if (missing := stage_costs(architecture)[-1].held + stage_costs(near)[0].held - room) > 0:
        raise InputError(
            f"{drafter} does not fit the last host next to its stage: {missing / MEGABYTE:,.1f} MB are missing"
        )
    return near


def _tokens(source: Source) -> str:
    """Number and tokenizer of a model's tokens, for people: equal texts mean equal tokens."""
    digest = hashlib.sha256(source.speech.tokenizer.encode()).hexdigest()
    return f"{source.architecture.vocabulary} of tokenizer {digest[:12]}"


@torch.inference_mode()
def build_stage(source: Source, architecture: LlamaArchitecture, index: int) -> LlamaStage:
    """One stage, filled from the source layer by layer. architecture: cut."""
    a = architecture
    with on_meta_device():
        stage = LlamaStage(a, index)
    stage.restore_tables()
    types = {name: tensor.dtype for name, tensor in stage.state_dict().items()}
    with one_thread_each() as threads:
        tensors = source.parts(EMBEDDING, a) if stage.is_first else {}
        for i in range(a.layers_in(index)):
            found = layer_tensors(source, sum(a.layers[:index]) + i, threads, a)
            tensors |= {(name := f"layers.{i}.{each}"): x.to(types[name]) for each, x in found.items()}
        if stage.is_last:
            tensors[NORM] = source.tensor(NORM)
        if isinstance(stage.head, nn.Linear):
            head = source.parts(EMBEDDING if a.tied_head else HEAD, a)
            tensors |= {name.replace("embedding.", "head."): x for name, x in head.items()}
    stage.load_state_dict(tensors, assign=True)
    return stage.eval().requires_grad_(False)


def write_own_part(source: Path, directory: Path, index: int, path: Path) -> None:
    """Write the beginning of a part's file from a source on this machine, reading only its layers.

    :param directory: has the manifest of the checkpoint that was imported elsewhere from that source. The probe's
        states at the end of the file need all earlier layers, so the importing machine has to send them.

    Raises InputError or CheckpointError."""
    manifest = read_manifest(directory)
    architecture = manifest.text_architecture
    assert isinstance(architecture, LlamaArchitecture)
    own, served = open_source(source), expected_shapes(architecture)
    found = own.shapes()
    if others := [name for name, shape in served.items() if found.get(name) != shape]:
        first = own.names.stored_name(others[0])
        message = f"{len(others)} of {len(served)} tensors of {source} are missing or of another shape, first {first}"
        raise InputError(f"{message}: it is not the model that is served")
    stage = build_stage(own, architecture, index)
    shapes = probe_shapes(stage, stored_probe(manifest).shape[1])
    probe = {name: torch.zeros(shape) for name, shape in shapes.items()}
    write_weights(path, stage.state_dict() | probe)
    os.truncate(path, path.stat().st_size - sum(each.nbytes for each in probe.values()))


def _cut(whole: LlamaArchitecture, settings: ImportSettings) -> LlamaArchitecture:
    """The same model in stages. Raises InputError."""
    context = min(whole.positions, DEFAULT_CONTEXT) if settings.context is None else settings.context
    if not 2 <= context <= whole.positions:
        raise InputError(f"--context must be 2 to {whole.positions} for this model, not {context}")
    window = whole.window
    if window is not None and window.size >= context and window.rope_theta is None:
        window = None  # it spans all positions
    total = sum(whole.layers)
    if not 1 <= settings.blocks <= total:
        raise InputError(f"--blocks {settings.blocks}: the model has {total} layers, and each stage needs at least one")
    hosts = settings.hosts or (StageHost(),) * settings.blocks
    whole = replace(whole, weights=settings.weights or whole.weights, positions=context, window=window)
    return replace(whole, layers=cut(whole, hosts))


def _needed(a: LlamaArchitecture) -> int:
    """Bytes that an import needs: the largest stage or a layer's assembly, plus a tensor's conversion."""
    layer = stage_cost(replace(a, weights="float32"), 1, False, False).held
    tensor = max(math.prod(shape) for name, shape in expected_shapes(a).items() if is_matrix(name, shape))
    return max(2 * layer, *(cost.held for cost in stage_costs(a))) + NUMBER_BYTES * TEMPORARIES * tensor + SPARE_BYTES


def _require_disk(needed: int, out: Path) -> None:
    """Raise CheckpointError if the disk of `out` has too little space."""
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if (free := shutil.disk_usage(there).free) < needed + SPARE_BYTES:
        raise CheckpointError(
            f"not enough disk for {out}: {(needed + SPARE_BYTES) / MEGABYTE:.0f} MB needed, "
            f"{free / MEGABYTE:.0f} MB free; free some, or name a directory on another disk"
        )


def _write_files(directory: Path, speech: Speech) -> dict[str, str]:
    """Write the files next to the weights; returns their digests."""
    contents = {TOKENIZER_NAME: speech.tokenizer.encode(), **speech.licences}
    for name, template in ((CHAT_TEMPLATE_NAME, speech.chat_template), (TOOL_TEMPLATE_NAME, speech.tool_template)):
        if template:
            contents[name] = template.encode(errors="replace")
    special_tokens = {**speech.named, "end_tokens": list(speech.ends), "sampling": speech.sampling}
    contents[SPECIALS_NAME] = (json.dumps(special_tokens, indent=2) + "\n").encode()
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}


def summary(manifest: Manifest) -> str:
    """The result of an import's gate, for people."""
    a, last = manifest.architecture, manifest.parts[-1]
    assert isinstance(a, LlamaArchitecture)
    assert last is not None
    stored = last.probe["next_token_nats"]
    as_stored = f", {stored:.3f} with {WEIGHT_WORDS[a.weights]}" if a.weights in WEIGHT_WORDS else ""
    nats = manifest.metrics["probe"]["next_token_nats"]
    no_model = f"(ln({a.vocabulary}) = {math.log(a.vocabulary):.2f} is the loss of untrained weights)"
    return f"{nats:.3f} nats a token on the probe text{as_stored} {no_model}"
