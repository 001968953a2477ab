"""The tree of commands: names, groups, sentences and examples. A command's options are built only when it is chosen."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TypeAlias


@dataclass(frozen=True)
class Command:
    """One command. Its code is imported only when it is chosen, so that help and typing errors take no time."""

    name: str
    sentence: str
    # Arguments after its name, as help shows them.
    arguments: str
    # MODULE:NAME. The function `run_NAME` runs the command; `add_NAME`, if present, adds its options.
    code: str

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        module, _, name = self.code.partition(":")
        functions = vars(import_module(module))
        if add := functions.get(f"add_{name}"):
            add(parser)
        parser.set_defaults(run=functions[f"run_{name}"])


@dataclass(frozen=True)
class Family:
    """Commands that share their first word, in groups; a group may have no title."""

    name: str
    sentence: str
    groups: Mapping[str, tuple[Command | Family, ...]]

    @property
    def members(self) -> Iterator[Command | Family]:
        for members in self.groups.values():
            yield from members

    def member(self, name: str) -> Command | Family | None:
        return next((member for member in self.members if member.name == name), None)


Words: TypeAlias = tuple[str, ...]

# Name, sentence, and an example's arguments.
Row: TypeAlias = tuple[str, str, str]


def _commands(*rows: str | Row | Family) -> tuple[Command | Family, ...]:
    """:param rows: commands, each after a MODULE:PREFIX that names its functions together with the command's name."""
    made, code = list[Command | Family](), ""
    for row in rows:
        if isinstance(row, str):
            code = row
        elif isinstance(row, Family):
            made.append(row)
        else:
            name, sentence, arguments = row
            made.append(Command(name, sentence, arguments, code + name.replace("-", "_")))
    return tuple(made)


def _family(name: str, sentence: str, *rows: str | Row) -> Family:
    return Family(name, sentence, {"": _commands(*rows)})


_CERTS = _family(
    "certs",
    "make and renew certificates of hosts, routers and clients",
    "serving.cli.admin:certs_",
    ("init", "make the authority that signs the others", ""),
    ("issue", "make a certificate of a host, router or client, or a key for releases", "host paris --address 10.8.0.1"),
    ("renew", "renew certificates, with the same keys and addresses", ""),
)
_TOKEN = _family(
    "token",
    "make and remove the access tokens of a router",
    "serving.cli.admin:token_",
    ("add", "make a token, and print it once", "alice --tokens tokens.toml"),
    ("list", "list names, scopes and limits", "--tokens tokens.toml"),
    ("remove", "remove a token; requests with it are refused from then on", "alice --tokens tokens.toml"),
)
_TRAIN = _family(
    "train",
    "train blocks or whole models, on this machine or on many",
    "trainer.commands:",
    ("text", "train a model of text: a chain's blocks one at a time, or a pipeline", "chain --data corpus/"),
    ("pictures", "train nets that draw", "chain --data fashion.npz"),
    ("tokenizer", "make a tokenizer, for --tokenizer of the others", "--data corpus/"),
    ("halve", "store a checkpoint's weights in 16 bits: half its size", "runs/ar --out ar-half"),
    "trainer.rounds.commands:",
    (
        "coordinate",
        "hand out a model's parts to workers, and merge their updates",
        "--config run.toml --data corpus/ --listen 10.8.0.9:7800",
    ),
    ("work", "train one part of a model for a coordinator", "--coordinator 10.8.0.9:7800 --data corpus/"),
    ("status", "watch a coordinator's run: parts, workers, and which are late", "10.8.0.9:7800"),
    ("simulate", "compare ways of merging, with workers on this machine", "--vary steps_per_round=10,100"),
    ("audit", "check that no update of a run was lost or merged twice", "runs/chain/rounds"),
)
_BENCH = Family(
    "bench",
    "measure latency, load, faults and quality",
    {
        "cost": _commands(
            "loadtest.benches:",
            ("host", "a sweep on top of the model, batching, idle servers", ""),
            ("peers", "a model's arithmetic against llama.cpp's", "--checkpoint smollm2 --source model.gguf"),
        ),
        "latency": _commands(
            "loadtest.benches:",
            ("wan", "every mode over far links, against a computed floor", "--profile links-60 --modes sweep,ar"),
        ),
        "load and faults": _commands(
            "loadtest.benches:",
            ("loadtest", "many users at once: latency, throughput, every text checked", "--users 16 --seconds 60"),
            ("chaos", "faults under load: nothing may be lost, no text may change", "--minutes 10 --seed 1"),
        ),
        "quality": _commands(
            "loadtest.benches:",
            ("quality", "quality of each mode's text or pictures, and the frontier of mode auto", "--prompts texts/"),
        ),
    },
)
_WAN = _family(
    "wan",
    "emulate hosts that are far apart, on this machine (Linux, root)",
    "loadtest.lab.commands:wan_",
    ("up", "make the network; it lasts until Ctrl-C", "--profile links-60"),
    ("exec", "run a program inside a node", "router -- ping -c 3 10.77.0.2"),
)

ROOT = Family(
    "onesweep",
    "train and serve a model whose blocks live on hosts far apart",
    {
        "start": _commands(
            "serving.cli.models:",
            ("run", "chat with your own model, over hosts started here", "model.gguf"),
            "serving.cli.remote:",
            (
                "serve",
                "serve a model over machines that join, with an API and a web page; prints a ticket",
                "model.gguf --wait 2",
            ),
            "serving.cli.machines:",
            ("join", "let this machine serve part of a model, with a ticket", "TICKET"),
            "serving.cli.serve:",
            ("up", "start hosts and a router on this machine", "--detach"),
            ("down", "stop what `up --detach` started", ""),
            ("status", "show hosts, modes and requests of a router", ""),
            "serving.cli.demo:",
            ("demo", "start three hosts here, run one prompt in every mode, stop", ""),
            "serving.cli.serve:",
            ("host", "run one host of a topology", "host-1 --topology topology.toml"),
            ("router", "run the router of a topology", "--topology topology.toml"),
            ("http", "serve an OpenAI-compatible API and a web page, in front of a router", "--listen 127.0.0.1:7780"),
        ),
        "ask": _commands(
            "serving.cli.generate:",
            ("generate", "continue a prompt", "'The sea was calm.' --max-bytes 200"),
            ("compare", "run one prompt in several modes, side by side", "'The sea was calm.' --modes sweep,ar"),
            "serving.cli.draw:",
            ("draw", "draw pictures of a class", "sneaker --seed 7 --out sneaker.png"),
            "serving.cli.chat:",
            ("chat", "chat with the model that a router serves", ""),
        ),
        "models": _commands(
            "serving.cli.models:",
            ("import", "make a checkpoint of a pretrained model", "model.gguf --blocks 3 --out smollm2"),
            ("inspect", "print what is in a checkpoint", "weights --verify"),
            "trainer.commands:",
            ("evaluate", "measure bits per byte of checkpoints on held-out text", "weights --data corpus/"),
        ),
        "operate": _commands(
            "serving.cli.serve:",
            ("doctor", "measure every hop of a ring, and suggest a fix for each bad one", ""),
            ("deploy", "deploy new weights to a running service, or roll back", "new-weights"),
            "serving.cli.remote:",
            ("invite", "make and revoke tickets for the model served from here", "paris --days 7"),
            "serving.cli.admin:",
            ("sign", "sign weights before they are deployed", "new-weights --key certs/ada.key"),
            _CERTS,
            _TOKEN,
        ),
        "train": (_TRAIN,),
        "measure": (_BENCH, _WAN),
    },
)


def walk(family: Family = ROOT, path: Words = ("onesweep",)) -> Iterator[tuple[Words, Command | Family]]:
    """Yield every family and command below, families before their members, with the words that name each."""
    for member in family.members:
        here = (*path, member.name)
        yield here, member
        if isinstance(member, Family):
            yield from walk(member, here)


def near(word: str, path: Words) -> list[str]:
    """Commands that an unknown `word` after `path` may mean: those of this name elsewhere, or of a similar name."""
    names: dict[str, Words] = {}
    for place, _ in sorted(walk(), key=lambda found: (found[0][:-1] != path, len(found[0]))):
        names.setdefault(place[-1], place)
    word = {"start": "up", "stop": "down"}.get(word, word)
    found = [word] if word in names else difflib.get_close_matches(word, names, n=2, cutoff=0.7)
    return [f"`{' '.join(names[name])}`" for name in found]


def find(words: Sequence[str]) -> tuple[Words, Command | Family, list[str]]:
    """The words that name a command, the command, and the remaining words; a family if no command is named or the next
    word is none of its members."""
    node: Command | Family = ROOT
    path: Words = (ROOT.name,)
    rest = list(words)
    while isinstance(node, Family) and rest and (member := node.member(rest[0])) is not None:
        node, path, rest = member, (*path, rest[0]), rest[1:]
    return path, node, rest
