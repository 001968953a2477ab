"""The tree of commands: imports of help, examples that work, and groups."""

import shlex
import subprocess
import sys
from functools import partial
from importlib import import_module

import pytest

from serving.cli.commands import Command, find, walk
from serving.cli.parser import parser_of

LOADED = "print(*sorted({'torch', 'grpc', 'numpy', 'tokenizers'} & set(sys.modules)))"
ASK = f"""
import sys
from serving.cli.__main__ import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code
print()
{LOADED}
"""
ALL = f"""
import sys
from serving.cli.commands import Command, walk
from serving.cli.parser import parser_of
for called, node in walk():
    if isinstance(node, Command):
        parser_of(called, node).format_help()
{LOADED}
"""


def last_line(program: str, *arguments: str) -> str:
    """The last line of a new interpreter: forked ones have loaded everything."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "line", ["--version", "help", "help bench", "generate --help", "compare --help", "train text --help"]
)
def test_help_imports_no_heavy_library(line: str) -> None:
    assert last_line(ASK, *line.split()) == ""


# As process 1, of a container, it needs a handler: the kernel ignores signals without one.
@pytest.mark.parametrize(("process", "handled"), [(2, "False False"), (1, "True True")])
def test_a_signal_during_imports_ends_the_process_without_a_traceback(process: int, handled: str) -> None:
    before = f"import os; os.getpid = lambda: {process}; from onesweep.__main__ import signal as s"
    assert last_line(f"{before}; print(*(callable(s.getsignal(each)) for each in (s.SIGINT, s.SIGTERM)))") == handled


def test_help_of_no_command_imports_torch_or_numpy() -> None:
    assert last_line(ALL) == "grpc"


SHARED = (
    "add_chat_options",
    "add_device",
    "add_import_options",
    "add_measurement",
    "add_own_and_shared",
    "add_router_options",
    "add_wait",
)
"""Options of several commands, declared beside those of one."""


def test_declared_options_belong_to_a_command() -> None:
    """A misspelt `add_NAME` would leave its command without options."""
    codes = {node.code for _, node in walk() if isinstance(node, Command)}
    for place in {code.partition(":")[0] for code in codes}:
        module = import_module(place)
        for name, value in vars(module).items():
            own = isinstance(value, partial) or getattr(value, "__module__", "") == module.__name__
            if own and name.startswith("add_") and name not in SHARED:
                assert f"{place}:{name.removeprefix('add_')}" in codes, f"{place}.{name} declares options of no command"


@pytest.mark.parametrize(
    ("called", "command"), [(called, node) for called, node in walk() if isinstance(node, Command)], ids=str
)
def test_every_command_has_a_summary_and_an_example_that_parses(called: tuple[str, ...], command: Command) -> None:
    words = shlex.split(command.arguments.partition("> ")[0])
    place, node, rest = find([*called[1:], *words])
    assert (place, node) == (called, command)
    parser = parser_of(called, command)
    assert callable(parser.parse(rest).run)
    assert command.sentence[0].islower()
    assert not command.sentence.endswith(".")
    assert f"example:\n  {' '.join(called)}" in parser.format_help()
