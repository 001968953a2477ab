"""What every server of pages needs: connections with bounds, a certificate that can be renewed, who may call.

Its modules need the extra `http`.
"""

from __future__ import annotations

from importlib.util import find_spec

from stages.errors import InputError


def check_framework(what: str) -> None:
    """Raise InputError unless what serves HTTP is installed."""
    if find_spec("fastapi") is None or find_spec("uvicorn") is None:
        raise InputError(f"{what} needs fastapi and uvicorn: pip install 'onesweep[http]'")
