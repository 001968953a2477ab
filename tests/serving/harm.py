"""Checkpoints that are harmed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "manifest.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def harm_with(harm: str, bundle: Path) -> None:
    chain = bundle / "chain"
    (weights,) = chain.glob("block-1-*.safetensors")
    match harm:
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-8])
        case "flipped":
            whole = weights.read_bytes()
            weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        case "missing":
            weights.unlink()
        case "digest":
            edit(chain, lambda record: record["parts"][1].update(sha256="0" * 64))
        case "untrained":
            edit(chain, lambda record: record["parts"].__setitem__(1, None))
        case "noise":
            edit(chain, lambda record: record["partition"].update(boundaries=[9.0, 7.0, 0.6, 0.2]))
        case "outside":
            edit(chain, lambda record: record["parts"][0].update(file="../../../outside.safetensors"))
        case "no checkpoint":
            shutil.rmtree(bundle)
