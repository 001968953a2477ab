"""Settings: frozen dataclasses whose fields become command-line flags and TOML keys.

    @dataclass(frozen=True)
    class LoadSettings(Checked):
        checkpoint: Path = field(metadata=flag("bundle to serve", metavar="DIR"))  # --checkpoint DIR, required
        users: int = setting(8, "users at once", minimum=1)  # --users N   users at once (8)
        timeout_s: float = setting(60.0, "deadline of a request", above=0)  # --timeout-s S
        modes: tuple[str, ...] = setting(("ar",), "modes", metavar="M[,M]")  # --modes M[,M]
        codec: Literal["fp32", "int8"] = setting("int8", "what travels")  # --codec {fp32,int8}
        report: Path | None = setting(None, "write a report")  # --report FILE
        verify: bool = setting(True, "accept any text")  # --no-verify
        lease_s: float = setting(9.0, "free it after", rare=True)  # --set lease_s=S
        lab: LabSettings = field(default_factory=LabSettings)  # its flags too; in TOML the section [lab]
        seed: int = field(default=0, metadata=limits(minimum=0))  # no flag, but bounds for TOML and `check`

    add_flags(parser, LoadSettings)
    settings = from_flags(LoadSettings, options)
    base = from_toml(LoadSettings, read_toml(path), str(path))
    settings = from_flags(LoadSettings, options, base)  # a flag wins over the file

A flag that was not given is None in `options`, even a switch: otherwise its default would override a file's value.
Help imports every module that declares flags, so such a module must not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
import tempfile
import tomllib
from collections.abc import Collection
from dataclasses import MISSING, Field, dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin

from stages.errors import ConfigError, InputError, OnesweepError, file_errors, one_of, quoted

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")
T = TypeVar("T")

_NOUNS: dict[Any, str] = {
    int: "whole number",
    float: "finite number",
    bool: "true or false",
    str: "a string",
    Path: "a path",
}
_METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "FILE"}
_UNITS = {"s": "S", "ms": "MS", "mb": "MB"}


@dataclass(frozen=True)
class Bounds:
    """The numbers that a setting accepts; `above` itself is excluded."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    def hold(self, value: float) -> bool:
        """True if `value` is within the bounds; false for NaN, infinity and whole numbers larger than any float."""
        return (
            abs(value) <= sys.float_info.max
            and (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
        )

    def words(self, value: float) -> str:
        """The bounds that `value` breaks, for an error: "above 0", "at least 1", "at most 9", "from 1 to 9"."""
        if self.minimum is not None and self.maximum is not None:
            return f"from {_shown(self.minimum)} to {_shown(self.maximum)}"
        if self.maximum is not None and value > self.maximum:
            return f"at most {_shown(self.maximum)}"
        if self.above is not None:
            return f"above {_shown(self.above)}"
        return "finite" if self.minimum is None else f"at least {_shown(self.minimum)}"


def limits(*, minimum: float | None = None, maximum: float | None = None, above: float | None = None) -> dict[str, Any]:
    """Metadata of a field with bounds and no flag."""
    return {"bounds": Bounds(minimum, maximum, above)}


def flag(
    help: str,
    *,
    name: str | None = None,
    shown: str | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    rare: bool = False,
    **argument: Any,  # noqa: ANN401 - whatever `add_argument` takes
) -> dict[str, Any]:
    """Metadata of a field with a flag, by default named after the field; a `name` without dashes makes it positional.

    Help shows the default in brackets after `help`, or `shown` in its place ("" for nothing). A tuple's flag takes
    entries separated by commas; with `action="append"` or `nargs`, one per word. `argument` goes to `add_argument`.
    A `rare` field has no flag of its own: `--set NAME=VALUE` sets it.
    """
    bounds = Bounds(minimum, maximum, above)
    return {"flag": name, "help": help, "shown": shown, "argument": argument, "bounds": bounds, "rare": rare}


def setting(default: T, help: str, **more: Any) -> T:  # noqa: ANN401 - of `flag`
    """A field with a default and a flag."""
    made: T = dataclasses.field(default=default, metadata=flag(help, **more))
    return made


def add_flags(parser: argparse._ActionsContainer, cls: type[S], only: Collection[str] | None = None) -> None:
    """Add the flags of `cls` and of the dataclasses in it, or of the fields named in `only`."""
    for f in dataclasses.fields(cls):
        if section := _section(f):
            add_flags(parser, section, only)
        elif "flag" in f.metadata and (only is None or f.name in only):
            (_add_rare if f.metadata["rare"] else _add_flag)(parser, f, *_kind(cls, f))


def from_flags(cls: type[S], options: argparse.Namespace, base: S | None = None, **values: object) -> S:
    """The settings from the flags, over `base` (else the defaults); `values` are for fields without a flag.

    Raises InputError that names the flag and its bounds, and any error of `cls`.
    """
    given = dict(values)
    for f in dataclasses.fields(cls):
        value = getattr(options, f.name, None)
        if f.name in values:
            continue
        if section := _section(f):
            given[f.name] = from_flags(section, options, getattr(base, f.name, None))
        elif "flag" in f.metadata and value is not None:
            bounds = f.metadata["bounds"]
            if isinstance(value, int | float) and not bounds.hold(value):
                raise InputError(f"{_name(f)} must be {bounds.words(value)}, not {value}")
            given[f.name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(base, **given) if base is not None else cls(**given)


def read_toml(path: Path, what: str = "") -> dict[str, Any]:
    """The tables of a file. Raises ConfigError that calls the file `what`, such as "the topology"."""
    with file_errors(ConfigError, f"cannot read {what} {path}".replace("  ", " ")):
        return parse_toml(path.read_bytes(), str(path))


def parse_toml(data: bytes, where: str) -> dict[str, Any]:
    """The tables of a text. Raises ConfigError that names its origin, `where`."""
    try:
        table = tomllib.loads(data.decode("utf-8-sig"))
        repr(table)  # fails for a hexadecimal number of over 4,300 digits, which no error message could show
        return table
    except (ValueError, RecursionError) as trouble:  # some are not a TOMLDecodeError: a number of 5,000 digits
        raise ConfigError(f"{where} is not TOML: {trouble}") from None


def from_toml(cls: type[S], table: object, where: str, base: S | None = None) -> S:
    """The settings from a table, over `base` (else the defaults).

    Raises ConfigError that names `where`, the key, the allowed values and the value.
    """
    if not isinstance(table, dict):
        raise ConfigError(f"{where} must be a group of settings, not {as_written(table)}")
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}
    given: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise ConfigError(f"{where}: unknown setting {quoted(key)}{one_of(key, sorted(known), 'available:')}")
        if section := _section(known[key]):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {key} must be a section [{key}]")
            given[key] = from_toml(section, value, f"{where} [{key}]", getattr(base, key, None))
            continue
        given[key] = tuple(value) if isinstance(value, list) else value
        if _kind(cls, known[key])[0] is Path and isinstance(value, str):
            given[key] = Path(value)
        if expected := _expected(cls, known[key], given[key]):
            raise ConfigError(f"{where}: {key} must {expected}, not {as_written(value)}")
    missing = [name for name, f in known.items() if _required(f) and name not in given]
    if missing and base is None:
        raise ConfigError(f"{where}: {missing[0]} is missing")
    try:
        return dataclasses.replace(base, **given) if base is not None else cls(**given)
    except InputError as trouble:  # some already name their section
        section = where.rpartition("[")[2].removesuffix("]") + ": "
        raise ConfigError(f"{where}: {str(trouble).removeprefix(section)}") from None


def as_written(value: object) -> str:
    """A value for an error, as written in TOML and JSON."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)[:80]


def check(settings: DataclassInstance, error: type[InputError] = ConfigError, where: str = "") -> None:
    """Raise `error` for a field whose annotation or bounds do not allow its value; `where` precedes its name."""
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if expected := _expected(type(settings), f, value):
            shown_value = ",".join(map(str, value)) or "[]" if isinstance(value, tuple) else as_written(value)
            raise error(f"{where}{f.name} must {expected}, not {shown_value}")


@dataclass(frozen=True)
class Checked:
    """Settings that `check` examines when they are made."""

    def __post_init__(self) -> None:
        check(self)


def check_destination(path: Path, flag: str = "--json") -> None:
    """Raise InputError if a flag's file cannot be written: before a run, not after it. Leaves no file behind."""
    with file_errors(InputError, f"cannot write {path}", f"choose another {flag} FILE"):
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()


def write_destination(path: Path, text: str) -> None:
    """Write a result. Raises OnesweepError if the disk is full or the folder has disappeared."""
    with file_errors(OnesweepError, f"cannot write {path}", "the figures above are complete"):
        path.write_text(text, encoding="utf-8")


class SetAction(argparse.Action):
    """`--set NAME=VALUE`, for a setting without a flag of its own."""

    def __init__(self) -> None:
        super().__init__(["--set"], argparse.SUPPRESS, metavar="NAME=VALUE", help="a setting without a flag; repeat")
        self._fields: dict[str, tuple[Field[Any], Any, Any]] = {}

    def add(self, f: Field[Any], kind: Any, entry: Any) -> None:  # noqa: ANN401 - types
        self._fields[f.name] = f, kind, entry

    @property
    def about(self) -> dict[str, str]:
        """The help of each setting, by its name."""
        return {name: _help_of(f) for name, (f, _, _) in self._fields.items()}

    def __call__(
        self, parser: argparse.ArgumentParser, options: argparse.Namespace, given: object, option: str | None = None
    ) -> None:
        name, equals, text = str(given).partition("=")
        if name not in self._fields:
            raise InputError(f"--set: unknown setting {quoted(name)}{one_of(name, sorted(self._fields), 'available:')}")
        if not equals:
            raise InputError(f"--set {name} has no value: give --set {name}=VALUE")
        f, kind, entry = self._fields[name]
        if kind is Literal and text not in entry:
            raise InputError(f"unknown {name} {quoted(text)}{one_of(text, entry)}")
        plain = str if kind is Literal else _listed(entry) if kind is tuple else kind
        convert = f.metadata["argument"].get("type", plain)
        try:
            setattr(options, name, convert(text))
        except ValueError:
            raise InputError(f"{name} must be {_described(kind, Bounds(), text)}, not {quoted(text)}") from None


def _add_rare(parser: argparse._ActionsContainer, f: Field[Any], kind: Any, entry: Any) -> None:  # noqa: ANN401
    found = next((action for action in parser._actions if isinstance(action, SetAction)), None)
    action = found or SetAction()
    if found is None:
        parser._add_action(action)
    action.add(f, kind, entry)
    parser.set_defaults(**{f.name: None})


def _help_of(f: Field[Any]) -> str:
    default = None if f.default is MISSING else f.default
    shown = f.metadata["shown"] if f.metadata["shown"] is not None else _shown(default)
    return f"{f.metadata['help']} ({shown})".lstrip() if shown else f.metadata["help"]


def _add_flag(parser: argparse._ActionsContainer, f: Field[Any], kind: Any, entry: Any) -> None:  # noqa: ANN401
    argument = dict(f.metadata["argument"])
    argument["help"] = _help_of(f).replace("%", "%%") or None
    default = None if f.default is MISSING else f.default
    name = _name(f)
    if kind is bool:
        parser.add_argument(name, dest=f.name, action="store_const", const=not default, default=None, **argument)
        return
    if name.startswith("-"):
        argument |= {"dest": f.name, "required": _required(f)}
    elif not _required(f):
        argument.setdefault("nargs", "*" if kind is tuple else "?")
    if kind is Literal and "type" not in argument:
        argument |= {"type": type(entry[0]), "choices": entry}
    elif kind is tuple and {"action", "nargs"} & argument.keys():
        argument = {"type": entry, "metavar": _METAVARS.get(entry), **argument}
    elif kind is tuple:
        one = _METAVARS.get(entry, "NAME")
        argument = {"type": _listed(entry), "metavar": f"{one}[,{one}]", **argument}
    elif kind is not None:
        unit = _UNITS.get(f.name.rpartition("_")[2]) if kind in (int, float) else None
        argument = {"type": kind, "metavar": unit or _METAVARS.get(kind), **argument}
    parser.add_argument(name if name.startswith("-") else f.name, default=None, **argument)


def _name(f: Field[Any]) -> str:
    if f.metadata["rare"]:
        return f.name
    return f.metadata["flag"] or f"--{'no-' * (f.default is True)}{f.name.replace('_', '-')}"


def _required(f: Field[Any]) -> bool:
    return f.default is MISSING and f.default_factory is MISSING


def _section(f: Field[Any]) -> Any:  # noqa: ANN401 - a dataclass
    """The dataclass that makes a field's default; None for other fields."""
    return f.default_factory if dataclasses.is_dataclass(f.default_factory) else None


def _kind(cls: type[S], f: Field[Any]) -> tuple[Any, Any]:
    """A field's type without `None`, with a tuple's entry type or a Literal's choices. None: unknown here."""
    kind: Any = f.type
    if isinstance(kind, str):
        owner = next(c for c in cls.__mro__ if f.name in inspect.get_annotations(c))
        try:
            kind = eval(kind, vars(sys.modules[owner.__module__]))
        except NameError:  # imported only for type checkers
            return None, None
    if get_origin(kind) in (Union, UnionType):
        kind = next(a for a in get_args(kind) if a is not NoneType)
    if get_origin(kind) is Literal:
        return Literal, get_args(kind)
    if get_origin(kind) is tuple and get_args(kind)[1:] == (...,) and get_args(kind)[0] in _NOUNS:
        return tuple, get_args(kind)[0]
    return (kind if kind in _NOUNS else None), None


def _expected(cls: type[S], f: Field[Any], value: object) -> str | None:
    """The rule for a field's values, for an error, such as "be a string"; None if the field accepts `value`."""
    kind, entry = _kind(cls, f)
    bounds = f.metadata.get("bounds", Bounds())
    if kind is None or (value is None and "None" in str(f.type)):
        return None
    if kind is Literal:
        return None if value in entry else f"be one of {', '.join(map(str, entry))}"
    if kind is not tuple:
        return None if _fits(value, kind, bounds) else f"be {_described(kind, bounds, value)}"
    if not isinstance(value, tuple):
        return f"be a list, each {_described(entry, bounds, 0)}"
    if not value and bounds != Bounds():
        return "have at least one entry"
    wrong = [v for v in value if not _fits(v, entry, bounds)]
    return f"each be {_described(entry, bounds, wrong[0])}" if wrong else None


def _fits(value: object, kind: Any, bounds: Bounds) -> bool:  # noqa: ANN401 - a type
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool) and bounds.hold(value)
    return isinstance(value, kind)


def _described(kind: Any, bounds: Bounds, value: object) -> str:  # noqa: ANN401 - a type
    """ "a whole number from 1 to 9", "a finite number of at least 0", "true or false" """
    if kind not in (int, float):
        return _NOUNS[kind]
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    words = bounds.words(number).replace("at ", "of at ").replace("finite", "")
    noun = "number" if kind is float and words.startswith("from") else _NOUNS[kind]
    return f"a {noun} {words}".strip()


def _listed(entry: Any) -> Any:  # noqa: ANN401 - a type, and a parser of texts
    def entries(text: str) -> tuple[Any, ...]:
        return tuple(entry(part) for part in text.split(","))

    entries.__name__ = {int: "numbers", float: "decimals"}.get(entry, "words")  # argparse: "invalid numbers value"
    return entries


def _shown(value: object) -> str:
    """A default as shown in help, a bound as in errors."""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
