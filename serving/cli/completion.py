"""`onesweep completion`: a script for a shell that completes commands, options and their choices."""

import argparse
from collections.abc import Iterator

from onesweep.serving.cli.commands import ROOT, Family, Words, walk
from onesweep.serving.cli.parser import parser_of

SHELLS = ("bash", "zsh", "fish")

# The words typed so far without options name a command; after an option with choices, those are offered.
_BASH = """_onesweep() {
    local path="onesweep" word current="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$path $word" in
            %(paths)s) path="$path $word" ;;
        esac
    done
    case "$path $before" in
%(choices)s
    esac
    case "$path" in
%(words)s
    esac
    [[ ${#COMPREPLY[@]} -gt 0 ]] || COMPREPLY=($(compgen -f -- "$current"))
}
complete -o filenames -F _onesweep onesweep
"""


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def run_completion(options: argparse.Namespace) -> int:
    print(script_for(options.shell), end="")
    return 0


def script_for(shell: str) -> str:
    """The script, from the tree of commands as it is now."""
    if shell == "fish":
        return "\n".join(_fish_lines()) + "\n"
    begin = "autoload -U +X compinit bashcompinit\ncompinit -u\nbashcompinit\n" if shell == "zsh" else ""
    tables = list(_tables())
    reply = 'COMPREPLY=($(compgen -W "{}" -- "$current"));{}'
    choices = [
        f'        "{called} {option}") ' + reply.format(" ".join(known), " return ;;")
        for called, _, options in tables
        for option, known in options.items()
        if known
    ]
    words = [
        f'        "{called}") ' + reply.format(" ".join([*members, *options]), ";")
        for called, members, options in tables
    ]
    paths = "|".join(f'"{called}"' for called, _, _ in tables)
    return begin + _BASH % {"paths": paths, "choices": "\n".join(choices), "words": "\n".join(words)}


def _tables() -> Iterator[tuple[str, list[str], dict[str, list[str]]]]:
    """The whole name of every command, the words that may follow it, and its options with their choices."""
    yield "onesweep", [member.name for member in ROOT.members], {"--help": [], "--version": []}
    for called, node in walk():
        if isinstance(node, Family):
            yield " ".join(called), [member.name for member in node.members], {"--help": []}
        else:
            words: list[str] = []
            found: dict[str, list[str]] = {}
            for action in parser_of(called, node)._actions:
                words += [str(choice) for choice in action.choices or () if not action.option_strings]
                for name in action.option_strings:
                    if name.startswith("--"):
                        found[name] = [str(choice) for choice in action.choices or ()]
            yield " ".join(called), words, found


def _fish_lines() -> Iterator[str]:
    for called, node in [(("onesweep",), ROOT), *walk()]:
        where = f"complete -c onesweep -n '{_fish_condition(called)}'"
        if isinstance(node, Family):
            known = " ".join(member.name for member in node.members)
            for member in node.members:
                says = f"{where[:-1]}; and not __fish_seen_subcommand_from {known}' -f"
                yield f"{says} -a {member.name} -d {_fish_quoted(member.sentence)}"
            continue
        for action in parser_of(called, node)._actions:
            for name in action.option_strings:
                if name.startswith("--"):
                    choices = f" -x -a '{' '.join(map(str, action.choices))}'" if action.choices else ""
                    value = " -r" if action.nargs != 0 and not choices else ""
                    help = _fish_quoted((action.help or "").replace("%%", "%"))
                    yield f"{where} -l {name[2:]}{value}{choices} -d {help}"


def _fish_condition(called: Words) -> str:
    """True where the command line has the words of `called`."""
    seen = [f"__fish_seen_subcommand_from {word}" for word in called[1:]]
    return "; and ".join(seen) or "true"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
