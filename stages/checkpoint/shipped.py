"""The weights that come with the repository."""

from importlib.resources import files
from pathlib import Path

# Beside the packages in a checkout, within one of them in a wheel. Resolved, for others compare paths with it.
_HOME = Path(str(files("onesweep"))).resolve()
SHIPPED = _HOME / "weights" if (_HOME / "weights" / "chain").is_dir() else _HOME.parent / "weights"
