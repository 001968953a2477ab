"""Writing a part's safetensors file, tensor by tensor: safetensors' own writer holds all of them twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

ALIGNMENT = 8


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A file that `read_weights` reads. tensors: float32, on any device. Raises OSError."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().view(-1).numpy().data.cast("B"))
