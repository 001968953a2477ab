"""A Hugging Face folder: config.json, safetensors with or without an index, tokenizer.json."""

import re
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from stages.errors import CheckpointError
from stages.importing.families import family_named
from stages.importing.family import NORMS, ModelFamily, refused_with
from stages.importing.huggingface_tokenizer import folder_speech, read_json
from stages.importing.source import Shape, Source, TensorPlace, expected_shapes, places_of
from stages.importing.speech import require_file

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_TOP = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_UNUSED = re.compile(r"\.rotary_emb\.inv_freq$")  # tables that old files store and that are computed anyway


class HuggingFaceSource(Source):
    """Raises CheckpointError for a folder that holds no supported model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = read_json(folder / "config.json")
        self.family = _family(config)
        with refused_with("config.json"):
            self.architecture = self.family.architecture(config)
        self._files = self._find()
        self.speech = folder_speech(folder, config, self.architecture.vocabulary)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "unknown")
        self.about = {"source": folder.resolve().name, "format": "safetensors", "dtype": dtype}

    def shapes(self) -> dict[str, Shape]:
        return {name: place.shape for name, place in self._places.items()}

    @cached_property
    def _places(self) -> dict[str, TensorPlace]:
        found: dict[str, Shape] = {}
        for file in sorted(set(self._files.values())):
            with self._open(file) as tensors:
                names = [name for name in tensors.keys() if not _UNUSED.search(name)]  # noqa: SIM118
                if unlisted := [name for name in names if name not in self._files]:
                    raise CheckpointError(f"{self.folder / INDEX} does not list {unlisted[0]}, which is in {file}")
                found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        return places_of(found, partial(our_names, family=self.family), expected_shapes(self.architecture))

    def read(self, name: str) -> Tensor:
        place = self._places[name]
        file, theirs = self._files[place.stored], place.stored
        with self._open(file) as tensors:
            try:
                whole = place.part is None
                tensor: Tensor = tensors.get_tensor(theirs) if whole else tensors.get_slice(theirs)[place.part]
            except SafetensorError as error:
                raise CheckpointError(f"{self.folder / file}: tensor {theirs} cannot be read ({error})") from None
        if not tensor.is_floating_point():
            raise CheckpointError(f"{self.folder / file}: tensor {theirs} is {tensor.dtype}, not a floating-point one")
        tensor = tensor.to(torch.float32)
        is_norm = name.split(".")[-2] in NORMS
        return tensor + 1 if is_norm and self.family.offset_norms else tensor

    def _find(self) -> dict[str, str]:
        """File of each stored tensor."""
        if (self.folder / INDEX).is_file():
            places = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(places, dict) or not all(_is_plain(file) for file in places.values()):
                raise CheckpointError(f"{self.folder / INDEX} has no weight_map of files in the same folder")
            if missing := sorted({file for file in places.values() if not (self.folder / file).is_file()}):
                count = len(set(places.values()))
                raise CheckpointError(f"{len(missing)} of {count} shards are missing: {', '.join(missing[:8])}")
        elif (self.folder / SINGLE).is_file():
            with self._open(SINGLE) as tensors:
                places = dict.fromkeys(tensors.keys(), SINGLE)
        else:
            raise CheckpointError(
                f"{self.folder} has neither {SINGLE} nor {INDEX}: only safetensors are read, pickled weights never"
            )
        return {name: file for name, file in places.items() if not _UNUSED.search(name)}

    def _open(self, file: str) -> Any:  # noqa: ANN401
        require_file(self.folder / file)
        try:
            return safe_open(self.folder / file, "pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.folder / file} cannot be read ({error}); fetch it again") from None


def our_names(name: str, family: ModelFamily) -> str:
    """Our names of what a tensor of a folder holds; an unknown one keeps its own."""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return _TOP.get(name, name)
    number, kind, end = match.groups()
    expert = re.search(r"(?<=\.experts\.)\d+(?=\.)", kind)
    key = kind if expert is None else f"{kind[: expert.start()]}*{kind[expert.end() :]}"
    if key not in family.tensors:
        return name
    ours = family.tensors[key] if expert is None else family.tensors[key].replace("*", expert[0])
    return " ".join(f"layers.{number}.{each}.{end}" for each in ours.split(" "))


def _family(config: Mapping[str, Any]) -> ModelFamily:
    named = config.get("architectures") or [None]
    family = family_named(named[0] if isinstance(named, list) else named)
    if config.get("quantization_config"):
        raise CheckpointError(
            "quantised safetensors (quantization_config) are not read: import the model unquantised, or as GGUF"
        )
    return family


def _is_plain(file: object) -> bool:
    return isinstance(file, str) and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors", file) is not None
