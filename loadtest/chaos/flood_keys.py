"""Two keys for a flood: one for the crowd that floods, one for the crowd beside it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from loadtest.chaos.flood import FloodSettings
from stages.token_options import TOKEN_VARIABLE
from stages.tokens import Key, new_token, token_hash, write_tokens


@contextlib.contextmanager
def two_keys(settings: FloodSettings) -> Iterator[FloodSettings]:
    """Settings of a deployment that asks for tokens; in the `with` block the flood's is this process's own."""
    own, polite = new_token(), new_token()
    before = os.environ.get(TOKEN_VARIABLE)
    with tempfile.TemporaryDirectory(prefix="onesweep-keys-") as directory:
        path = Path(directory) / "tokens.toml"
        write_tokens(path, [Key("flood", token_hash(own)), Key("polite", token_hash(polite))])
        target = settings.load.target
        options = (*target.router_options, "--tokens", str(path))
        load = replace(settings.load, target=replace(target, router_options=options))
        os.environ[TOKEN_VARIABLE] = own
        try:
            yield replace(settings, load=load, polite_token=polite)
        finally:
            os.environ.pop(TOKEN_VARIABLE)
            if before is not None:
                os.environ[TOKEN_VARIABLE] = before
