"""Checkpoints that are harmed."""

import shutil
from pathlib import Path

from tests.stages.conftest import edit_manifest


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
            edit_manifest(chain, lambda record: record["parts"][1].update(sha256="0" * 64))
        case "untrained":
            edit_manifest(chain, lambda record: record["parts"].__setitem__(1, None))
        case "noise":
            edit_manifest(chain, lambda record: record["partition"].update(boundaries=[9.0, 7.0, 0.6, 0.2]))
        case "outside":
            edit_manifest(chain, lambda record: record["parts"][0].update(file="../../../outside.safetensors"))
        case "no checkpoint":
            shutil.rmtree(bundle)
