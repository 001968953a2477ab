"""A store accepts the files that a release's manifests name, and nothing else."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from stages.checkpoint.manifest import MANIFEST_NAME
from stages.checkpoint.release_store import (
    MAX_STORED,
    IncomingRelease,
    ReleaseManifest,
    ReleaseStore,
    read_release_manifest,
)
from stages.errors import CheckpointError, InputError, ServiceError


@pytest.fixture
def store(tmp_path: Path) -> ReleaseStore:
    return ReleaseStore(tmp_path / "releases")


@pytest.fixture
def contents(bundles: Path) -> ReleaseManifest:
    return read_release_manifest(bundles / "own")


def of_block_1(folder: str, part: int) -> bool:
    return folder != "local" and part == 1


def raw(contents: ReleaseManifest, path: str) -> bytes:
    folder, _, name = path.partition("/")
    return (contents.directories[folder] / name).read_bytes()


def fill(intake: IncomingRelease, contents: ReleaseManifest) -> None:
    for path in intake.missing:
        data = raw(contents, path)
        intake.write(path, data[:1000])
        intake.write(path, data[1000:])
    intake.finish()


def test_a_host_stores_only_its_own_blocks(store: ReleaseStore, contents: ReleaseManifest, monkeypatch) -> None:
    with monkeypatch.context() as small:
        small.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=9))
        with pytest.raises(ServiceError, match="9 free, and 67108864 must stay free; free some"):
            store.begin(contents, of_block_1)
    intake = store.begin(contents, of_block_1)
    assert {path.split("-")[0] for path in intake.missing} == {"chain/block", "ar/stage"}
    assert len(intake.missing) == 2
    assert store.path(contents.name) is None
    fill(intake, contents)
    place = store.path(contents.name)
    assert read_release_manifest(place).name == contents.name
    assert not list(store.directory.glob(".coming*"))


def test_stored_files_are_not_requested_again(store: ReleaseStore, contents: ReleaseManifest, bundles: Path) -> None:
    fill(store.begin(contents, of_block_1), contents)
    assert not store.begin(contents, of_block_1).missing
    mixed = ReleaseManifest(
        {**contents.manifests, "scorer": contents.manifests["ar"]}, directories=contents.directories
    )
    assert [path.split("/")[0] for path in store.begin(mixed, of_block_1).missing] == ["scorer"]
    store.remove_others([])
    intake = store.begin(contents, of_block_1)
    first, second = intake.missing
    intake.write(first, raw(contents, first))
    assert list(store.begin(contents, of_block_1).missing) == [second], "after a break it continues where it was"
    store.begin(contents, of_block_1).write(second, raw(contents, second)[:1000])
    again = store.begin(contents, of_block_1)
    assert again.requests == [f"{second}@1000"]
    with pytest.raises(CheckpointError, match="was not requested"):
        again.write(f"{second}@999", b"x")
    again.write(f"{second}@1000", raw(contents, second)[1000:])
    again.finish()


def test_a_file_not_requested_is_refused(store: ReleaseStore, contents: ReleaseManifest, tmp_path: Path) -> None:
    intake = store.begin(contents, of_block_1)
    for path in ("../../evil", "/etc/evil", f"chain/{MANIFEST_NAME}", "chain/block-0.safetensors", ""):
        with pytest.raises(CheckpointError, match="was not requested"):
            intake.write(path, b"x")
    path, part = next(iter(intake.missing.items()))
    with pytest.raises(CheckpointError, match="has more than"):
        intake.write(path, bytes(part.bytes + 1))
    with pytest.raises(CheckpointError, match="SHA-256"):
        store.begin(contents, of_block_1).write(path, bytes(part.bytes))
    with pytest.raises(CheckpointError, match="ended after 0 of"):
        store.begin(contents, of_block_1).finish()
    assert {path.name for path in tmp_path.iterdir()} == {"releases"}


@pytest.mark.parametrize(
    ("manifests", "says"),
    [
        ({}, "has no manifest"),
        ({"../chain": b"{}"}, "is not a folder of a bundle"),
        ({"chain": b"{"}, "is damaged"),
        ({"chain": bytes(2 << 20)}, "a manifest or frontier has 2097152 bytes"),
    ],
)
def test_an_invalid_release_is_refused(store: ReleaseStore, manifests: dict[str, bytes], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        store.begin(ReleaseManifest(manifests), of_block_1)


def test_a_damaged_release_is_repaired(store: ReleaseStore, contents: ReleaseManifest) -> None:
    fill(store.begin(contents, of_block_1), contents)
    place = store.path(contents.name)
    (spoilt,) = (place / "ar").glob("stage-1-*")
    spoilt.write_bytes(bytes(spoilt.stat().st_size))
    intake = store.begin(contents, of_block_1)
    assert list(intake.missing) == [f"ar/{spoilt.name}"]
    fill(intake, contents)
    assert spoilt.read_bytes() == raw(contents, f"ar/{spoilt.name}")
    assert len(list(place.rglob("*.safetensors"))) == 2


def test_a_release_is_synced_before_it_is_in_its_place(
    store: ReleaseStore, contents: ReleaseManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("stages.checkpoint.release_store.sync", synced.append)
    intake = store.begin(contents, of_block_1)
    fill(intake, contents)
    place = store.path(contents.name)
    due = {intake.incoming / path.relative_to(place) for path in place.rglob("*")}
    assert {*synced} == due | {intake.incoming, store.directory}


def test_unused_releases_are_removed(store: ReleaseStore, contents: ReleaseManifest) -> None:
    used, *others = [f"{i:016x}" for i in range(MAX_STORED + 1)]
    for name in (used, *others):
        (store.directory / name).mkdir()
    store.use([used])
    fill(store.begin(contents, of_block_1), contents)
    assert {path.name for path in store.directory.iterdir() if path.is_dir()} == {used, contents.name}


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_store_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    with pytest.raises(InputError, match="must belong to you, and nobody else may write to it: chmod 700"):
        ReleaseStore(tmp_path / "open")


def test_a_store_belongs_to_one_process(store: ReleaseStore, tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="another process is using the release store"):
        ReleaseStore(store.directory)
    store.close()
    ReleaseStore(store.directory).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot use --releases"):
        ReleaseStore(tmp_path / "file")
