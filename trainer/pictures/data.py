"""Pictures with classes, from folders of PNG or JPEG or npz archives, checked before they are decoded."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from stages.errors import DataError, file_errors
from stages.model.architecture import MAX_CHANNELS, MAX_CLASSES, MAX_SIDE
from stages.model.randomness import Purpose, uniforms

VALID_SHARE = 0.05
MAX_BYTES = 2 << 30  # of decoded pixels, which stay in memory
# Other formats can hide a program, a film or a whole document; two formats suffice.
SUFFIXES = (".png", ".jpg", ".jpeg")
FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


@dataclass(frozen=True)
class LabelledPictures:
    pixels: Tensor  # (pictures, channels, height, width) uint8
    labels: Tensor  # (pictures,) int64

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> LabelledPictures:
        return LabelledPictures(self.pixels[indices], self.labels[indices])


@dataclass(frozen=True)
class PictureSet:
    """Pictures for training, for choosing settings, and for the final measurement. `test` may be empty."""

    name: str
    classes: tuple[str, ...]
    train: LabelledPictures
    valid: LabelledPictures
    test: LabelledPictures
    device: str = "cpu"  # of the batches

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the training pictures and their classes."""
        found = hashlib.sha256(repr((self.classes, tuple(self.train.pixels.shape))).encode())
        found.update(self.train.pixels.numpy().data)
        found.update(self.train.labels.numpy().data)
        return found.hexdigest()


def load_pictures(path: Path) -> PictureSet:
    """Load the pictures at `path`: an npz archive, or a folder with a folder per class.

    Splits part of the training pictures off for validation. Raises DataError.
    """
    with file_errors(DataError, f"cannot read {path}"):
        classes, train, test = _read_folders(path) if path.is_dir() else _read_npz(path)
    _check_classes(path, classes, train)
    # Random but always the same split: many sets are sorted by class, and a later training must not see these pictures.
    order = torch.from_numpy(uniforms(0, Purpose.WINDOWS, 0, len(train), 1)[:, 0].argsort())
    cut = max(int(VALID_SHARE * len(train)), 1)
    return PictureSet(path.stem, classes, train.take(order[cut:]), train.take(order[:cut]), test)


def _check_classes(path: Path, classes: Sequence[str], train: LabelledPictures) -> None:
    if not 2 <= len(classes) <= MAX_CLASSES:
        raise DataError(f"{path} must have 2 to {MAX_CLASSES} classes, not {len(classes)}")
    counts = torch.bincount(train.labels, minlength=len(classes))
    for name, count in zip(classes, counts.tolist(), strict=True):
        if count < 2:
            raise DataError(f"{path}: class {name!r} has {count} training pictures; give at least 2, or leave it out")


# npz

_NPZ_KEYS = ("train_x", "train_y", "test_x", "test_y")


def _read_npz(path: Path) -> tuple[tuple[str, ...], LabelledPictures, LabelledPictures]:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
        if size > MAX_BYTES:
            raise DataError(f"{path} declares {size} bytes of arrays; the limit is {MAX_BYTES}")
        with np.load(path) as arrays:
            train, test = (_labelled(path, arrays, part) for part in ("train", "test"))
            names = np.atleast_1d(_array(path, arrays, "classes", "U")).flat if "classes" in arrays else ()
            classes = tuple(map(str, names))
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, ValueError) as error:
        raise DataError(f"{path} is neither an npz archive ({error}) nor a folder of pictures") from None
    count = 1 + max((int(part.labels.max()) for part in (train, test) if len(part)), default=0)
    if not classes:
        fashion = path.stem.startswith("fashion") and count == len(FASHION)
        classes = FASHION if fashion else tuple(map(str, range(count)))
    if count > len(classes):
        raise DataError(f"{path} has label {count - 1}, but only {len(classes)} classes")
    return classes, train, test


def _array(path: Path, arrays: Mapping[str, NDArray[Any]], key: str, kind: str = "uint8") -> NDArray[Any]:
    """One array of bytes or strings. Never unpickles objects."""
    try:
        found = np.asarray(arrays[key])  # bytes if its header is not an array's
    except KeyError:
        raise DataError(f"{path} has no {key}: an archive of pictures needs {', '.join(_NPZ_KEYS)}") from None
    except Exception as error:  # numpy parses the header as Python
        raise DataError(f"{path}: {key} is not an array of {'strings' if kind == 'U' else kind} ({error})") from None
    if kind not in (found.dtype.name, found.dtype.kind):
        raise DataError(f"{path}: {key} has dtype {found.dtype}; store {'strings' if kind == 'U' else kind}")
    return found


def _labelled(where: Path, arrays: Mapping[str, NDArray[Any]], part: str) -> LabelledPictures:
    pixels, labels = _array(where, arrays, f"{part}_x"), _array(where, arrays, f"{part}_y")
    if pixels.ndim == 3:
        pixels = pixels[:, None]
    if pixels.ndim != 4 or pixels.shape[1] > MAX_CHANNELS or labels.shape != pixels.shape[:1]:
        raise DataError(
            f"{where}: pictures of shape {pixels.shape} and labels of shape {labels.shape} do not match; "
            "pictures must be (n, channels, height, width), labels (n,)"
        )
    _check_size(where, pixels.shape[3], pixels.shape[2])
    return LabelledPictures(torch.from_numpy(pixels.copy(order="C")), torch.from_numpy(labels.astype(np.int64)))


def _check_size(where: Path, width: int, height: int) -> None:
    if not (1 <= width <= MAX_SIDE and 1 <= height <= MAX_SIDE):
        raise DataError(f"{where} has {width} x {height} pixels; scale it down to at most {MAX_SIDE} x {MAX_SIDE}")


# Folders


def _read_folders(folder: Path) -> tuple[tuple[str, ...], LabelledPictures, LabelledPictures]:
    """CLASS/*.png, or train/CLASS/*.png and test/CLASS/*.png."""
    has_parts = (folder / "train").is_dir()
    train, classes = _read_classes(folder / "train" if has_parts else folder, None)
    test = LabelledPictures(train.pixels[:0], train.labels[:0])
    if has_parts and (folder / "test").is_dir():
        test, _ = _read_classes(folder / "test", classes, train.pixels.shape[1:])
    return classes, train, test


def _read_classes(
    folder: Path, known: tuple[str, ...] | None, shape: Sequence[int] | None = None
) -> tuple[LabelledPictures, tuple[str, ...]]:
    names = known or tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    if not names:
        raise DataError(f"{folder} has no subfolders: put the pictures of each class into a subfolder with its name")
    # sorted, so that every machine gives a class the same number
    paths: Mapping[str, list[Path]] = {
        name: sorted(path for path in (folder / name).glob("*") if path.suffix.lower() in SUFFIXES) for name in names
    }
    for name, found in paths.items():
        if not found and known is None:
            raise DataError(f"{folder / name} has no pictures ({', '.join(SUFFIXES)}): add some or remove it")
    pictures, labels, size = list[NDArray[np.uint8]](), list[int](), 0
    for label, name in enumerate(names):
        for path in paths[name]:
            picture = _read_picture(path)
            shape = shape or picture.shape
            if picture.shape != tuple(shape):
                raise DataError(f"{path} is {_described(picture.shape)}, others {_described(shape)}: all must be alike")
            size += picture.size
            if size > MAX_BYTES:
                raise DataError(f"{folder} has more than {MAX_BYTES} bytes of pixels: use fewer or smaller pictures")
            pictures.append(picture)
            labels.append(label)
    return LabelledPictures(torch.from_numpy(np.stack(pictures)), torch.tensor(labels)), names


def _described(shape: Sequence[int]) -> str:
    return f"{shape[2]} x {shape[1]} in {'grey' if shape[0] == 1 else 'colour'}"


def _read_picture(path: Path) -> NDArray[np.uint8]:
    """(channels, height, width): one channel for grey, else three."""
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as picture:
            _check_size(path, *picture.size)  # before decoding a pixel
            grey = picture.mode in ("1", "L", "I", "I;16", "LA")
            if picture.mode.startswith("I"):  # 16 bits: `convert` would turn all but the darkest pixels white
                array = (np.asarray(picture) >> 8).astype(np.uint8)
            else:
                whole = picture.convert("RGBA")  # on white, because transparent pixels have colours too
                seen = Image.alpha_composite(Image.new("RGBA", whole.size, "white"), whole)
                array = np.asarray(seen.convert("L" if grey else "RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot read {path} as PNG or JPEG: {error}; replace or remove it") from None
    return array[None] if array.ndim == 2 else np.ascontiguousarray(array.transpose(2, 0, 1))
