"""The spellings of the models that a router can serve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from serving.spelling import BYTES_NAME, IN_BYTES, Spelling
from stages.bundle import find_bundle
from stages.manifest import TOKENIZER_NAME, Manifest, read_manifest
from stages.v1 import stage_pb2


class Spellings:
    """Those of token models by the models' digests, which say which tokenizer belongs to them."""

    def __init__(self, of_tokens: Mapping[str, Spelling]) -> None:
        self._of_tokens = of_tokens

    def of(self, model: stage_pb2.ModelInfo) -> Spelling:
        """That of a model of the hosts, for which there is no `problem`."""
        return self.named(model.digest)

    def named(self, digest: str) -> Spelling:
        """That of the model with this digest, here or on the hosts."""
        return self._of_tokens.get(digest, IN_BYTES)

    def problem(self, model: stage_pb2.ModelInfo) -> str:
        """Why texts for a model of the hosts cannot be spelled; empty when they can."""
        if model.tokenizer == BYTES_NAME or model.digest in self._of_tokens:
            return ""
        return (
            f"the hosts' model {model.digest[:12]} reads tokens, and the router has no tokenizer of it: start it with "
            "--checkpoint DIR, the same checkpoint"
        )


NO_TOKENS = Spellings({})


def tokenizer_of(manifest: Manifest) -> str:
    """Which symbols a model reads, as `Spelling.tokenizer` has it."""
    return BYTES_NAME if manifest.tokenizer == BYTES_NAME else manifest.files[TOKENIZER_NAME]


def read_spellings(directory: Path) -> Spellings:
    """Of the token models in a bundle. Blocks. Raises OnesweepError where a tokenizer is missing or damaged."""
    of_tokens: dict[str, Spelling] = {}
    for path in vars(find_bundle(directory)).values():
        if path is None or (manifest := read_manifest(path)).tokenizer == BYTES_NAME:
            continue
        from serving.token_spelling import read_token_spelling  # byte models do without its libraries

        of_tokens[manifest.digest()] = read_token_spelling(path, manifest)
    return Spellings(of_tokens)
