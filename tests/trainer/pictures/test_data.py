import io
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stages.errors import DataError
from trainer.pictures.data import load_pictures

PIXELS = np.random.default_rng(0).integers(256, size=(20, 1, 8, 8), dtype=np.uint8)
LABELS = (np.arange(20) % 2).astype(np.uint8)


def write_npz(path: Path, **changed: object) -> Path:
    arrays = {"train_x": PIXELS, "train_y": LABELS, "test_x": PIXELS[:4], "test_y": LABELS[:4], **changed}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})  # type: ignore[arg-type]
    return path


def write_folders(path: Path, sizes: dict[str, int]) -> Path:
    for name, count in sizes.items():
        (path / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(PIXELS[i, 0]).save(path / name / f"{i}.png")
    return path


def test_archives_and_folders_give_the_same_pictures(tmp_path: Path) -> None:
    found = load_pictures(write_npz(tmp_path / "a.npz"))
    assert found.classes == ("0", "1")
    assert len(found.train) + len(found.valid) == 20
    assert np.array_equal(found.test.pixels.numpy(), PIXELS[:4])
    for i, (label, (picture,)) in enumerate(zip(LABELS, PIXELS, strict=True)):
        for part, keep in (("train", True), ("test", i < 4)):
            folder = tmp_path / "folders" / part / ("cat" if label == 0 else "dog")
            folder.mkdir(parents=True, exist_ok=True)
            if keep:
                sixteen_bits = picture.astype(np.uint16) * 256 + 7
                Image.fromarray(picture if label == 0 else sixteen_bits).save(folder / f"{i:02}.png")
    folders = load_pictures(tmp_path / "folders")
    assert folders.classes == ("cat", "dog")
    assert len(folders.test) == 4
    assert sorted(folders.train.pixels.flatten(1).tolist() + folders.valid.pixels.flatten(1).tolist()) == sorted(
        PIXELS.reshape(20, -1).tolist()
    )
    bands = [Image.new("L", (8, 8), level) for level in (1, 2, 3, 255)]
    bands[3].putpixel((7, 7), 0)
    for path in (tmp_path / "folders").rglob("*.png"):
        Image.merge("RGBA", bands).save(path)
    colour = load_pictures(tmp_path / "folders").train
    assert colour.pixels[0, :, 0, 0].tolist() == [1, 2, 3]
    assert colour.pixels[0, :, 7, 7].tolist() == [255, 255, 255], "transparent pixels are white"
    assert colour.pixels.is_contiguous(), "its digest is made of the bytes"


def test_validation_and_training_pictures_are_disjoint(tmp_path: Path) -> None:
    found = load_pictures(write_npz(tmp_path / "a.npz"))
    train, valid = ({picture.tobytes() for picture in part.pixels.numpy()} for part in (found.train, found.valid))
    assert valid
    assert not train & valid


def test_damaged_or_false_archives_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    lying = tmp_path / "lying.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (1 << 40, 1, 8, 8)})
    with zipfile.ZipFile(lying, "w") as archive:
        for key in ("train_x", "train_y", "test_x", "test_y"):
            archive.writestr(f"{key}.npy", header.getvalue() + b"few")
    endless = tmp_path / "endless.npz"
    with zipfile.ZipFile(endless, "w") as archive:
        archive.writestr("train_x.npy", b"\x93NUMPY\1\0\x02\0{\n")
    short = tmp_path / "short.npz"
    with zipfile.ZipFile(write_npz(tmp_path / "whole.npz")) as source, zipfile.ZipFile(short, "w") as archive:
        for name in source.namelist():
            archive.writestr(name, source.read(name)[:-1])
    for path, message in (
        (tmp_path / "text.npz", "is neither an npz archive"),
        (lying, "train_x is not an array of uint8"),
        (endless, "train_x is not an array of uint8"),
        (write_npz(tmp_path / "names.npz", classes=np.array([{}, "dog"])), "classes is not an array of strings"),
        (write_npz(tmp_path / "few.npz", classes=np.array(["cat"])), "has label 1, but only 1 classes"),
        (short, "train_x is not an array of uint8"),
        (write_npz(tmp_path / "keys.npz", train_y=None), "has no train_y"),
        (write_npz(tmp_path / "pickled.npz", train_x=np.array([{}] * 20)), "train_x is not an array of uint8"),
        (write_npz(tmp_path / "floats.npz", train_x=PIXELS / 255), "train_x has dtype float64"),
        (write_npz(tmp_path / "shapes.npz", train_y=LABELS[:7]), "do not match"),
        (write_npz(tmp_path / "last.npz", train_x=PIXELS.transpose(0, 2, 3, 1)), r"pictures must be \(n, channels"),
        (write_npz(tmp_path / "one.npz", train_y=LABELS * 0, test_y=LABELS[:4] * 0), "classes, not 1"),
        (write_npz(tmp_path / "gap.npz", train_y=LABELS * 2), "class '1' has 0 training pictures"),
        (tmp_path / "nowhere", "cannot read"),
    ):
        with pytest.raises(DataError, match=message):
            load_pictures(path)


def test_folders_with_invalid_pictures_are_refused(tmp_path: Path) -> None:
    for name, change, message in (
        ("empty", lambda folder: (folder / "c").mkdir(), "c has no pictures"),
        ("truncated", lambda folder: cut(folder / "a" / "0.png"), "0.png as PNG or JPEG"),
        ("text", lambda folder: (folder / "a" / "1.png").write_text("no picture"), "1.png as PNG"),
        ("mixed", lambda folder: Image.new("L", (4, 8)).save(folder / "b" / "0.png"), "is 4 x 8 in grey, others"),
        ("colour", lambda folder: Image.new("RGB", (8, 8)).save(folder / "b" / "0.png"), "is 8 x 8 in colour"),
        ("large", lambda folder: write_huge(folder / "b" / "0.png", 5_000), "scale it down to at most 1024"),
        ("huge", lambda folder: write_huge(folder / "b" / "0.png", 40_000), "1600000000 pixels. exceeds limit"),
    ):
        folder = write_folders(tmp_path / name, {"a": 3, "b": 3})
        change(folder)  # type: ignore[no-untyped-call]
        with pytest.raises(DataError, match=message):
            load_pictures(folder)
    with pytest.raises(DataError, match="classes, not 1"):
        load_pictures(write_folders(tmp_path / "single", {"a": 3}))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def write_huge(path: Path, side: int) -> None:
    """A PNG whose header promises more pixels than it has: to decode them would take the machine's memory."""
    buffer = io.BytesIO()
    Image.new("L", (1, 1)).save(buffer, "PNG")
    data = bytearray(buffer.getvalue())
    data[16:24] = struct.pack(">II", side, side)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    path.write_bytes(data)
