"""Manifests: they come back as they were written, and anything odd is refused in one sentence."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stages.checkpoint.manifest import MANIFEST_NAME, Manifest, Part, read_manifest
from stages.errors import CheckpointError
from stages.model.architecture import Architecture
from stages.model.partition import NoisePartition
from stages.model.randomness import Codes

PART = Part("block-0-0123456789ab.safetensors", "0" * 64, 200_000, {"next_byte_nats": 2.25})


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        kind="chain",
        architecture=Architecture(parts=2, code_dim=8),
        parts=(PART, None),
        codes=Codes(3, 8),
        partition=NoisePartition("equal_entropy", (10.0, 0.6, 0.15)),
        probe_text="A probe.",
        data={"name": "a text"},
        training={"steps": 10, "chunks": [1, 8]},
        metrics={"chain": {"from_noise_nats": 1.5}},
    )


@pytest.fixture
def write(tmp_path: Path, manifest: Manifest) -> Callable[..., Path]:
    """Write the manifest after a change to its record."""

    def writer(change: Callable[[dict[str, Any]], object] = lambda record: None) -> Path:
        record = json.loads(manifest.to_json())
        change(record)
        (tmp_path / MANIFEST_NAME).write_text(json.dumps(record))
        return tmp_path

    return writer


def test_a_manifest_is_read_as_it_was_written(write: Callable[..., Path], manifest: Manifest) -> None:
    read = read_manifest(write())
    assert read == manifest
    assert read.digest() == manifest.digest()
    assert read.to_json() == manifest.to_json()


def test_the_digest_depends_only_on_the_weights(manifest: Manifest) -> None:
    same = replace(manifest, metrics={}, data={}, training={}, probe_tolerance=0.5)
    assert same.digest() == manifest.digest()
    others = [
        replace(manifest, architecture=replace(manifest.architecture, width=256)),
        replace(manifest, codes=Codes(4, 8)),
        replace(manifest, partition=NoisePartition("equal_entropy", (10.0, 0.7, 0.15))),
        manifest.with_part(0, replace(PART, sha256="1" * 64)),
        manifest.with_part(1, PART),
    ]
    assert len({manifest.digest(), *(other.digest() for other in others)}) == 6


# Damage
def test_a_missing_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*manifest.json is missing"):
        read_manifest(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        read_manifest(tmp_path / "file")


NO_JSON = {"empty": b"", "cut": b"{", "binary": b"\xff\xfe", "deep": b"[" * 100_000, "long number": b"1" * 10_000}
NO_FORMAT = [b"[]", b"null", b"{}", b'{"format": "1"}', b'{"format": true}', b'{"format": 1.0}']


@pytest.mark.parametrize("text", [*NO_JSON.values(), *NO_FORMAT], ids=[*NO_JSON, *map(repr, NO_FORMAT)])
def test_invalid_json_and_a_missing_format_are_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(text)
    with pytest.raises(
        CheckpointError, match="no format number|does not hold an object" if text in NO_FORMAT else "is damaged"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_not_finite_is_refused(write: Callable[..., Path], number: str) -> None:
    path = write() / MANIFEST_NAME
    text = path.read_text()
    assert '"from_noise_nats": 1.5' in text
    path.write_text(text.replace('"from_noise_nats": 1.5', f'"from_noise_nats": {number}'))
    with pytest.raises(CheckpointError, match=f"{number} is not a finite number"):
        read_manifest(path.parent)


@pytest.mark.parametrize(("number", "advice"), [(2, "upgrade onesweep"), (0, "export it again")])
def test_another_format_is_refused_with_advice(write: Callable[..., Path], number: int, advice: str) -> None:
    with pytest.raises(CheckpointError, match=f"format {number}, this version reads 1: {advice}"):
        read_manifest(write(lambda record: record.update(format=number)))


@pytest.mark.parametrize(
    "name",
    ["../block.safetensors", "/etc/block.safetensors", "a/b.safetensors", "..", "", "block.bin", "a\0.safetensors",
     ".safetensors", "a\\b.safetensors", "\ud800.safetensors", "C:a.safetensors"],
)  # fmt: skip
def test_a_file_outside_the_checkpoint_is_refused(write: Callable[..., Path], name: str) -> None:
    with pytest.raises(CheckpointError, match=r"plain \.safetensors name"):
        read_manifest(write(lambda record: record["parts"][0].update(file=name)))


CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "kind": (lambda r: r.update(kind="mixture"), "kind must be one of chain, ar, steps, not 'mixture'"),
    "no kind": (lambda r: r.pop("kind"), "damaged: kind is missing"),
    "too few parts": (lambda r: r["parts"].pop(), "1 parts listed, but the architecture has 2"),
    "too many parts": (lambda r: r["parts"].append(None), "3 parts listed, but the architecture has 2"),
    "parts are no list": (lambda r: r.update(parts=7), "damaged: parts must be a list, not 7; fetch it again"),
    "a part of text": (
        lambda r: r["parts"].__setitem__(0, "part"),
        "an entry of parts must be a group of settings, not 'part'",
    ),
    "a part without digest": (lambda r: r["parts"][0].pop("sha256"), "an entry of parts: sha256 is missing"),
    "a part with more": (lambda r: r["parts"][0].update(extra=1), "unknown setting 'extra'; available: bytes, file"),
    "a short digest": (lambda r: r["parts"][0].update(sha256="00"), "SHA-256"),
    "a size of text": (lambda r: r["parts"][0].update(bytes="1000"), "bytes must be a whole number, not '1000'"),
    "a probe of text": (lambda r: r["parts"][0].update(probe={"next_byte_nats": "2"}), "must be numbers"),
    "architecture": (lambda r: r["architecture"].update(width=7), "width 7"),
    "another family": (lambda r: r["architecture"].update(family="graft"), "family 'graft' is unknown"),
    "unknown size": (lambda r: r["architecture"].update(depth=7), "damaged.*depth"),
    "code width": (lambda r: r["codes"].update(dim=9), "codes have 9 dimensions, but the architecture has 8"),
    "code digest": (lambda r: r["codes"].update(digest="f" * 64), "recorded digest ffffffffffff"),
    "no codes": (lambda r: r.update(codes=None), "codes must be an object, not null"),
    "no partition": (lambda r: r.update(partition=None), "partition must be an object, not null"),
    "boundaries": (lambda r: r["partition"]["boundaries"].pop(), "2 boundaries for 2 noise ranges"),
    "rising boundaries": (lambda r: r["partition"]["boundaries"].reverse(), "must fall"),
    "prior": (lambda r: r["partition"]["prior"].update(std=0), "positive std"),
    "tokenizer": (lambda r: r.update(tokenizer="bpe"), "tokenizer 'bpe' is neither 'bytes' nor 'tokens'"),
    "empty probe": (lambda r: r.update(probe_text=""), "at least two bytes"),
    "no tolerance": (lambda r: r.update(probe_tolerance=0), "probe tolerance 0"),
    "metrics are a list": (lambda r: r.update(metrics=[1]), "metrics must be an object"),
    "metrics are words": (
        lambda r: r["metrics"].update(probe={"next_token_nats": "x"}),
        "metrics of probe must map",
    ),
    "deep metrics": (lambda r: r["metrics"].update(a=json.loads("[" * 600 + "]" * 600)), "lists are nested more than"),
    "no metrics": (lambda r: r.pop("metrics"), "damaged: metrics is missing"),
}


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_contradictory_manifest_is_refused(write: Callable[..., Path], what: str) -> None:
    change, reason = CONTRADICTIONS[what]
    directory = write(change)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        read_manifest(directory)
    assert str(directory / MANIFEST_NAME) in str(refusal.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    *[(name,) for name in ("kind", "architecture", "parts", "codes", "partition", "tokenizer", "probe_text")],
    *[("architecture", name) for name in ("parts", "layers", "width", "heads", "context", "code_dim")],
    *[("codes", name) for name in ("seed", "dim", "digest")],
    *[("partition", name) for name in ("kind", "boundaries", "prior", "overlap")],
    *[(name,) for name in ("data", "training", "metrics")],
    *[("parts", 0, name) for name in ("file", "sha256", "bytes", "probe")],
    ("format",),
    ("probe_tolerance",),
]


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(field=st.sampled_from(FIELDS), value=JSON)
def test_any_value_in_any_field_is_read_or_refused(write, field: tuple[str | int, ...], value: object) -> None:
    def change(record: dict[str, Any]) -> None:
        place: Any = record
        for key in field[:-1]:
            place = place[key]
        place[field[-1]] = value

    try:
        read_manifest(write(change))
    except CheckpointError as error:
        refused = str(error)
    else:
        refused = ""
    assert not refused or MANIFEST_NAME in refused
