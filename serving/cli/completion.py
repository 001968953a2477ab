"""`onesweep completion`: a script for a shell that completes commands, options and their choices."""

import argparse

import shtab

from serving.cli.commands import ROOT, Family

SHELLS = ("bash", "zsh", "fish")


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run_completion(options: argparse.Namespace) -> int:
    print(script_for(options.shell))
    return 0


def script_for(shell: str) -> str:
    """The script, from the tree of commands as it is now."""
    parser = argparse.ArgumentParser(ROOT.name)
    parser.add_argument("--version", action="store_true", help="print the version")
    _add_members(parser, ROOT)
    return shtab.complete(parser, shell)


def _add_members(parser: argparse.ArgumentParser, family: Family) -> None:
    members = parser.add_subparsers()
    for member in family.members:
        below = members.add_parser(member.name, help=member.sentence)
        if isinstance(member, Family):
            _add_members(below, member)
        else:
            member.add_options(below)
