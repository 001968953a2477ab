"""The parser of a command: without abbreviations, with one-sentence errors that name a remedy."""

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from serving.cli.commands import Command, Family, Words, find, near, walk
from stages.errors import InputError, close_to, quoted
from stages.limits import MAX_THREADS
from stages.settings import Bounds, SetAction

WIDTH = 100
CHANGES = Path(__file__).parents[2] / "CHANGELOG.md"  # in a source tree; a wheel has none
TEXT = "\0"  # marks a word after --, which argparse would lose or read as an option; no word of a shell has it
MAXIMA = {"threads": MAX_THREADS, "port": 65535}
_NOUNS = {"int": "a whole number", "float": "a number", "numbers": "whole numbers such as 1,3"}


class UsageError(InputError):
    """Words that no command accepts; the message begins with the command."""


class CommandParser(argparse.ArgumentParser):
    """A parser of one command's options, which raises UsageError where argparse would print usage and exit."""

    _words: Sequence[str] = ()

    def __init__(self, prog: str, **settings: Any) -> None:  # noqa: ANN401 - of argparse
        super().__init__(
            prog,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=WIDTH),
            **settings,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """The options of a command line. Raises UsageError."""
        self._words = words
        before = [*takewhile("--".__ne__, words)]
        # The words of a program to run come last and hold no options; elsewhere options and texts stand in any order.
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            options, extra = self.parse_known_args(list(words))
        elif any(word[:2] == "-h" != word for word in before):
            self.error("-h takes no value")  # newer Pythons read -hello as -h and something else
        else:
            options, extra = self.parse_known_intermixed_args([*before, *(TEXT + w for w in words[len(before) + 1 :])])
        if extra:
            self.error(f"unexpected {quoted(extra[0].lstrip(TEXT))}: put text with spaces in quotes")
        return options

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {self._unknown_option() or _plain(message)}; see `{self.prog} --help`")

    def _unknown_option(self) -> str:
        """A sentence about the first unknown option; empty if all are known."""
        known = self._option_string_actions
        for word in takewhile("--".__ne__, self._words):
            name = word.partition("=")[0]
            if not word.startswith("-") or name in known or re.fullmatch(r"-+[\d.]*", word):
                continue
            if not word.startswith("--"):
                return f"no option {name}: write -- before a text, ./ before a file that begins with a dash"
            if (setting := name[2:].replace("-", "_")) in settings_of(self):
                return f"no option {name}: give --set {setting}=VALUE"
            return f"no option {name}{removed_hint(name, self.prog.split()) or close_to(name, known)}"
        return ""

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:  # noqa: ANN401 - of any type
        arg_string = arg_string.lstrip(TEXT)
        if action.type is Path and not arg_string:  # an unset shell variable, which Path would read as "."
            raise argparse.ArgumentError(action, "the name of a file or directory is empty")
        return super()._get_value(action, arg_string)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            hint = removed_hint(str(value), self.prog.split())
            words = f"{quoted(str(value))} is not one of {', '.join(known)}{hint or close_to(str(value), known)}"
            raise argparse.ArgumentError(action, words)


def removed_hint(word: str, called: Sequence[str] = ()) -> str:
    """A hint from the changelog if a row of removed things names this word, and no command or one in `called`."""
    changes = CHANGES.read_text(encoding="utf-8") if CHANGES.is_file() else ""
    known = {name for path, _ in walk() for name in path}
    for row in re.findall(r"^\| (.+?) \| ", changes, re.MULTILINE):
        own = row if called else re.sub("[^;]* of `[^;]*", "", row)  # options of a command are not commands
        named = set(" ".join(re.findall(r"`([^`]+)`", own)).split())
        if word in named and (not called or named & {*called} or not named & known):
            return " (CHANGELOG.md says what to use now)"
    return ""


def _plain(message: str) -> str:
    message = re.sub(r"^argument (?:-\w/)?([^\s:]+):", r"\1:", message)
    if match := re.fullmatch(r"(.+): invalid (\w+) value: (.+)", message):
        name, kind, value = match.groups()
        return f"{name} must be {_NOUNS[kind]}, not {value}" if kind in _NOUNS else f"{name} cannot be {value}"
    message = re.sub(r"(.+): expected one argument", r"\1 needs a value", message)
    message = re.sub(r"(.+): expected at least one argument", r"\1 needs at least one value", message)
    message = re.sub(
        r"(.+): not allowed with argument (.+)", r"\1 and \2 cannot be used together: give one of them", message
    )
    missing = re.fullmatch("the following arguments are required: (.+)", message)
    return f"{missing[1]} {'are' if ', ' in missing[1] else 'is'} missing" if missing else message


def parser_of(path: Words, command: Command) -> CommandParser:
    sentence = command.sentence[0].upper() + command.sentence[1:] + "."
    example = " ".join([*path, command.arguments]).strip()
    parser = CommandParser(" ".join(path), description=sentence, epilog=f"example:\n  {example}")
    command.add_options(parser)
    if settable := settings_of(parser):
        lines = [f"  {name.ljust(20)}  {about}" for name, about in settable.items()]
        parser.epilog = "\n".join(["settings of --set NAME=VALUE:", *lines, "", parser.epilog or ""])
    if parser.usage is None:
        needed = [_written(action) for action in parser._actions if action.required or not action.option_strings]
        parser.usage = " ".join(["%(prog)s", *needed, "[options]"])
    return parser


def settings_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The settings that `--set` accepts: the help of each, by name."""
    found = (action.about for action in parser._actions if isinstance(action, SetAction))
    return next(found, {})


def _written(action: argparse.Action) -> str:
    """An argument as in usage: "--topology FILE", "PROMPT", "[NAME]", "CKPT ..."."""
    shown = str(action.metavar or action.dest.upper())
    if action.option_strings:
        return f"{action.option_strings[-1]} {shown}"
    return f"[{shown}]" if action.nargs in ("?", "*") else shown + " ..." * (action.nargs == "+")


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a whole command line; for help and version, prints and exits. Raises UsageError."""
    path, node, rest = find(words)
    if isinstance(node, Command):
        return parser_of(path, node).parse(rest)
    if rest[:1] == ["help"]:
        return parse([*path[1:], *rest[1:], "--help"])
    if rest[:1] in (["-h"], ["--help"]):
        print(help_of(path, node))
        raise SystemExit(0)
    if rest[:1] == ["--version"] and len(path) == 1:
        from importlib.metadata import version  # takes longer than everything else here

        print(f"onesweep {version('onesweep')}")
        raise SystemExit(0)
    if not rest:
        print(help_of(path, node), file=sys.stderr)
        raise SystemExit(2)
    called = " ".join(path)
    if rest[0].startswith("-"):
        known = ["--help", "--version"][: 1 + (len(path) == 1)]
        advice = close_to(rest[0], known) or ": the command comes first, then its options"
        raise UsageError(f"{called}: no option {rest[0]}{advice}; see `{called} --help`")
    hint = removed_hint(rest[0])
    # a one-word command may be in a family now; a family's removed command is unrelated to others of its name
    found = near(rest[0], path) if len(path) == 1 or not hint else []
    advice = f"did you mean {' or '.join(found)}?" if found else f"`{called} --help` lists them"
    raise UsageError(f"{called}: unknown command {quoted(rest[0])}{hint}; {advice}")


def help_of(path: Words, family: Family) -> str:
    """Usage, and every member with its sentence, grouped."""
    called = " ".join(path)
    lines = [f"usage: {called} COMMAND ...", "", f"{family.sentence[0].upper()}{family.sentence[1:]}."]
    width = max(len(member.name) for member in family.members) + 2
    for title, members in family.groups.items():
        lines += ["", f"{title}:" if title else "commands:"]
        for member in members:
            indent = " " * (4 + width)
            sentence = textwrap.fill(member.sentence, WIDTH, initial_indent=indent, subsequent_indent=indent).strip()
            lines.append(f"  {member.name.ljust(width)}  {sentence}")
    more = ", --version" if len(path) == 1 else ""
    lines += [
        "",
        f"options: --help{more}",
        f"`{called} COMMAND --help` shows the options of a command, and an example.",
    ]
    return "\n".join(lines)


def prompt_of(word: str) -> str:
    """The prompt from the command line; `-` reads standard input. Raises InputError."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig") if word == "-" else word
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 (byte {error.start}): give UTF-8 text") from None


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Raise InputError unless these options are above 0 and not absurdly large."""
    for name in names:
        value, bounds = getattr(options, name), Bounds(maximum=MAXIMA.get(name), above=0)
        if value is not None and not bounds.hold(value):
            raise InputError(f"--{name.replace('_', '-')} must be {bounds.words(value)}, not {value}")
