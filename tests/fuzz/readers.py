"""Everything that is read from files, which others may have written."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from serving.modes.frontier import Frontier, Option, read_frontier
from serving.router.topology import SHIPPED, local_topology, read_topology
from stages.checkpoint.bundle import FRONTIER_NAME
from stages.checkpoint.checkpoint import read_weights
from stages.checkpoint.manifest import MANIFEST_NAME, read_manifest
from stages.wire.auth import HOST, Identity
from stages.wire.tls import Tls, check_authority
from stages.wire.tokens import Key, read_tokens, token_hash, write_tokens
from trainer.pictures.data import load_pictures

FRONTIER = Frontier(
    (
        Option("local", (), 2.5, 256, 0.0, 0.0, 0.0, 200.0, 0.0),
        Option("resample", (("scorer", "ar"), ("chunk", 32)), 2.0, 256, 8.0, 8.0, 90.0, 30.0, 9e3, 1.9, 2.1),
    ),
    {"ar": "a" * 64, "local": "b" * 64},
    "judge",
    1.5,
)


@dataclass(frozen=True)
class Reader:
    """Something that reads bytes of a kind."""

    name: str
    sample: bytes
    read: Callable[[bytes], object]  # raises OnesweepError


def readers(directory: Path) -> list[Reader]:
    """All of them, with a sample each. They read files in `directory`."""

    def file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
        path = directory / name
        path.touch(0o600)

        def written(data: bytes) -> object:
            path.write_bytes(data)
            return read(path)

        return written

    tokens = directory / "sample"
    write_tokens(
        tokens, [Key("ann", token_hash("a"), ("generate",), rate=2.5, concurrent=3), Key("bo", token_hash("b"))]
    )
    tiny, shapes = _tiny_weights()

    def weights(path: Path) -> object:
        data = path.read_bytes()
        return read_weights(path, len(data), hashlib.sha256(data).hexdigest(), shapes)

    found = [
        Reader("topology", local_topology(2, 3, SHIPPED).to_toml().encode(), file("topology.toml", read_topology)),
        Reader("tokens", tokens.read_bytes(), file("tokens.toml", read_tokens)),
        Reader("frontier", json.dumps(FRONTIER.to_record()).encode(), file(FRONTIER_NAME, read_frontier)),
        Reader("weights", tiny, file("w", weights)),
    ]
    for kind in ("chain", "ar", "pictures/chain", "pictures/steps"):
        sample = (SHIPPED / kind / MANIFEST_NAME).read_bytes()
        (directory / kind).mkdir(parents=True)
        manifest = file(f"{kind}/{MANIFEST_NAME}", lambda path: read_manifest(path.parent))
        found.append(Reader(f"manifest of {kind}", sample, manifest))
    found += _pictures(directory, file)
    if find_spec("cryptography") is not None:
        found += _certificates(directory, file)
    return found


def _tiny_weights() -> tuple[bytes, dict[str, tuple[int, ...]]]:
    import torch
    from safetensors.torch import save

    return save({"a": torch.ones(2, 3), "b": torch.zeros(4)}), {"a": (2, 3), "b": (4,)}


def _pictures(
    directory: Path, file: Callable[[str, Callable[[Path], object]], Callable[[bytes], object]]
) -> list[Reader]:
    """Data to train on: one file of each kind, or one array of an archive, beside others that are whole."""
    import numpy as np
    from PIL import Image

    def saved(write: Callable[[io.BytesIO], object]) -> bytes:
        write(buffer := io.BytesIO())
        return buffer.getvalue()

    pixels, labels = np.arange(8 * 16, dtype=np.uint8).reshape(8, 4, 4), np.arange(8, dtype=np.uint8) % 2
    names = np.array(["cat", "dog"])
    archive = saved(
        lambda out: np.savez(out, train_x=pixels, train_y=labels, test_x=pixels, test_y=labels, classes=names)
    )
    png = saved(lambda out: Image.fromarray(pixels[0]).save(out, "PNG"))
    folders = directory / "folders"
    for name in ("cat", "dog"):
        (folders / name).mkdir(parents=True)
        for number in range(2):
            (folders / name / f"{number}.png").write_bytes(png)

    # the checksums of an archive keep damage from what lies in it, but not a liar
    def within(name: str) -> Callable[[bytes], object]:
        def packed(data: bytes) -> object:
            path = directory / "packed.npz"
            with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(path, "w") as out:
                for each in source.namelist():
                    out.writestr(each, data if each == name else source.read(each))
            return load_pictures(path)

        return packed

    found = [
        Reader("npz", archive, file("pictures.npz", load_pictures)),
        Reader("PNG", png, file("folders/cat/0.png", lambda path: load_pictures(folders))),
    ]
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        return found + [
            Reader(f"{name} of an npz", source.read(name), within(name)) for name in ("train_x.npy", "classes.npy")
        ]


def _certificates(
    directory: Path, file: Callable[[str, Callable[[Path], object]], Callable[[bytes], object]]
) -> list[Reader]:
    from stages.wire.certificates import Authority

    authority = Authority.create(directory / "pki", days=5)
    leaf = authority.issue(Identity(HOST, "paris"), ("127.0.0.1",), 5)
    ca, key = directory / "pki" / "ca.pem", leaf.path.with_suffix(".key")
    return [
        Reader("certificate", leaf.path.read_bytes(), file("leaf.pem", lambda path: Tls(ca, path, key).read())),
        Reader("key", key.read_bytes(), file("leaf.key", lambda path: Tls(ca, leaf.path, path).read())),
        Reader("authority", ca.read_bytes(), lambda data: check_authority(ca, data)),
    ]
