"""The weights that come with the repository."""

from importlib.resources import files
from pathlib import Path

# Beside the packages in a checkout, within one of them in a wheel. Resolved, for others compare paths with it.
_HOME = Path(str(files("onesweep"))).resolve()
SHIPPED = _HOME / "weights" if (_HOME / "weights" / "chain").is_dir() else _HOME.parent / "weights"
# Draft heads of published models, by the SHA-256 of the model's last norm in float32, which files of every precision
# hold alike.
SHIPPED_HEADS = {
    # SmolLM2-135M-Instruct
    "3b87f8e27335e67fc08f159cabfd2d18f205d6c5b225a6f978153552bf01d559": SHIPPED / "smollm2" / "draft-head.safetensors"
}
