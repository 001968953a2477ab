"""docs/reference.md, made from the parsers, the settings and the modes. `python .ci/reference.py` writes it."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from serving.cli.commands import ROOT, Command, Words, walk
from serving.cli.parser import parser_of, settings_of
from serving.client import result
from serving.modes import MODES
from serving.modes.auto import PREFERENCE
from serving.router.admission import PLACE_STATES
from serving.router.rollout_state import DELIVERY_STATES, ROLLOUT_STATES

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "reference.md"
WIDTH = 120

# Options that go together, by the name that a command's line has for them, and a command that has them all.
SETS = {
    "request": ("generate", "--max-bytes --max-tokens --seed --temperature --budget-ms --timeout-s"),
    "server": ("host", "--threads --releases --health --metrics"),
    "TLS server": ("host", "--tls-cert --tls-key --tls-ca --insecure"),
    "TLS": ("generate", "--tls-ca --insecure"),
    "settings": ("train text", "--config --data --threads"),
}

# Tables by which states change.
STATES = {"A request at a router": PLACE_STATES, "A deployment": ROLLOUT_STATES, "A release's way": DELIVERY_STATES}

# Of this group the page has names and defaults only: the sentences of its many options are in `--help`.
BRIEF = "measure"

# Flag with its value, and help: options that agree in both are the same.
Option = tuple[str, str]


def option_of(action: argparse.Action) -> Option:
    """An argument as the page shows it."""
    value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
    shown = "[,]".join(value) if isinstance(value, tuple) else value
    if action.choices and not action.metavar:
        shown = "|".join(map(str, action.choices))
    name = action.option_strings[-1] if action.option_strings else ""
    help = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return f"{name} {shown}".strip(), help[:1].lower() + help[1:] if help[1:2].islower() else help


def options_of(path: Words, command: Command) -> list[Option]:
    actions = parser_of(path, command)._actions
    return [option_of(action) for action in actions if not isinstance(action, argparse._HelpAction)]


def commands_by_group() -> Iterator[tuple[str, list[tuple[Words, Command]]]]:
    """Of each group of `onesweep --help`: its commands, those of families among them."""
    everything = list(walk())
    for title, members in ROOT.groups.items():
        names = [member.name for member in members]
        yield title, [(path, node) for path, node in everything if path[1] in names and isinstance(node, Command)]


@dataclass(frozen=True)
class Shared:
    """The options that several commands have: sets, and of each flag and value the one that most of them have."""

    sets: dict[str, list[Option]]
    others: dict[str, Option]

    @classmethod
    def among(cls, every: dict[Words, list[Option]]) -> Shared:
        sets = {}
        for title, (specimen, flags) in SETS.items():
            options = {flag_of(option): option for option in every[("onesweep", *specimen.split())]}
            sets[title] = [options[flag] for flag in flags.split()]
        counted = Counter(o for options in every.values() for o in dict.fromkeys(options) if flag_of(o)[0] == "-")
        others = dict[str, Option]()
        for option, count in counted.most_common():
            if count > 1 and option[1]:
                others.setdefault(option[0], option)
        return cls(sets, others)

    def split(self, given: list[Option]) -> tuple[list[Option], list[str]]:
        """The options of a command that need words of their own, and the names of the others, and of sets."""
        left, names = list(given), []
        for title, options in self.sets.items():
            if set(options) <= set(left):
                names.append(f"*{title}*")
                left = [option for option in left if option not in options]
        common = [option for option in left if self.others.get(option[0]) == option]
        return [o for o in left if o not in common], [*map(self.name_of, common), *names]

    def name_of(self, option: Option) -> str:
        """A shared option's flag, with its value where another shared one has the same flag."""
        twins = [name for name in self.others if name.split()[0] == flag_of(option)]
        return f"`{option[0] if len(twins) > 1 else flag_of(option)}`"


def flag_of(option: Option) -> str:
    return option[0].split()[0]


def wrapped(text: str) -> str:
    # a number or dash at the start of a line would be a list
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def described(option: Option) -> str:
    name, help = option
    return f"`{name}` {help}".strip().replace("|", "\\|")


def page() -> str:
    """The whole page."""
    every = {path: options_of(path, node) for path, node in walk() if isinstance(node, Command)}
    shared = Shared.among(every)
    commands: list[str] = []
    for title, members in commands_by_group():
        commands += ["", f"### {title}"]
        for path, command in members:
            own, names = shared.split(every[path])
            needed = [option[0] for option in own if flag_of(option)[0] != "-"]
            own = [option for option in own if option[1] or flag_of(option)[0] == "-"]
            line = f"**`{' '.join([*path, *needed])}`** {command.sentence}."
            if title == BRIEF:
                own = [(name, "".join(re.findall(r"\([^()]*\)$", help))) for name, help in own]
            line += f" {'; '.join(map(described, own))}." if own else ""
            line += f" Also {', '.join(names)}." if names else ""
            commands += ["", wrapped(line)]
    options = [f"**{title}**: {'; '.join(map(described, found))}." for title, found in shared.sets.items()]
    in_sets = {option for found in shared.sets.values() for option in found}
    rest = [option for _, option in sorted(shared.others.items()) if option not in in_sets]
    options.append(f"**others**: {'; '.join(map(described, rest))}.")
    settable: dict[str, list[str]] = {}
    for path, node in walk():
        if isinstance(node, Command) and (found := settings_of(parser_of(path, node))):
            about = "; ".join(map(described, found.items()))
            settable.setdefault(about, []).append(f"`{' '.join(path[1:])}`")
    options += [f"**`--set` of {', '.join(names)}**: {about}." for about, names in settable.items()]
    options = [line for option in options for line in (wrapped(option), "")][:-1]
    modes = ["| mode | sweeps | what it does |", "|---|---|---|"]
    modes += [f"| `{name}` | {sweeps} | {does} |" for name, (sweeps, does) in MODES.items()]
    text = (HERE / "reference.md").read_text(encoding="utf-8")
    parts = {"COMMANDS": commands, "OPTIONS": options, "MODES": modes, "KEYS": keys(), "STATES": diagrams()}
    for name, lines in parts.items():
        text = text.replace(f"\n{name}\n", "\n" + "\n".join(lines) + "\n\n")
    return text.replace("ORDER", ", ".join(f"`{name}`" for name in PREFERENCE))


def diagrams() -> list[str]:
    """STATES as GitHub draws them."""
    lines = list[str]()
    for name, table in STATES.items():
        arrows = [f"{state} --> {after}: {event}" for state, events in table.items() for event, after in events.items()]
        lines += [f"{name}:", "", "```mermaid", "stateDiagram-v2", f"[*] --> {next(iter(table))}", *arrows, "```", ""]
    return lines[:-1]


def keys() -> list[str]:
    """A row for each field of a result, with the comment above it."""
    source = Path(result.__file__).read_text(encoding="utf-8").partition("class Cost:")[2]
    rows = ["| key | meaning |", "|---|---|"]
    for field in fields(result.Result):
        name = "output_hex" if field.name == "output" else field.name
        comment = re.search(rf"((?:    # .*\n)*)    {field.name}: ", source)
        description = " ".join(line.strip(" #") for line in comment[1].splitlines()) if comment else ""
        rows.append(f"| `{name}` | {description.removesuffix('.').replace('|', chr(92) + '|')} |")
    return rows


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
