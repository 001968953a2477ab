"""Commands in deploy/, the docs and the README are commands that there are."""

from serving.cli.commands import Family, find
from serving.cli.parser import CommandParser, UsageError, parser_of

Commands = list[tuple[str, list[str]]]


def command_of(words: list[str]) -> tuple[CommandParser, list[str]]:
    """The parser of a command, and the words that are left for it. Raises KeyError."""
    called, node, rest = find(words)
    if isinstance(node, Family):
        raise KeyError(" ".join([*called, *rest[:1]]))
    return parser_of(called, node), rest


def missing(words: list[str]) -> list[str]:
    """Commands and flags that do not exist."""
    try:
        parser, rest = command_of(words)
    except KeyError as error:
        return [f"command {error}"]
    own = rest[: rest.index("--")] if "--" in rest else rest
    flags = [word.partition("=")[0] for word in own if word.startswith("--")]
    return [flag for flag in flags if flag not in parser._option_string_actions]


def test_every_command_and_flag_exists(commands: Commands) -> None:
    assert len(commands) > 100
    broken = [f"{where}: {', '.join(names)}" for where, words in commands if (names := missing(words))]
    assert not broken, "onesweep does not know:\n" + "\n".join(broken)


def test_every_command_parses(commands: Commands) -> None:
    broken = []
    for where, words in commands:
        if missing(words):
            continue  # the test above reports it
        parser, rest = command_of(words)
        try:
            parser.parse(rest)
        except UsageError as error:
            broken.append(f"{where}: {error}")
    assert not broken, "\n".join(broken)


def test_every_server_has_a_persistent_release_store(commands: Commands) -> None:
    servers = [(where, words) for where, words in commands if ".md," not in where and words[0] != "http"]
    assert {words[0] for _, words in servers} >= {"host", "router"}
    for where, words in servers:
        (store,) = [words[at] + words[at + 1] for at, word in enumerate(words) if word.startswith("--releases")]
        assert "/var/lib/" in store, where
