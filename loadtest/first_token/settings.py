"""What `onesweep bench first-token` is told, and everything that can be wrong with it before a lab is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadtest.spelt import spelled, spelling_of
from loadtest.wan.lab import lab_problem
from loadtest.wan.profile import Profile
from loadtest.wan_bench.settings import DEFAULT_HOSTS
from serving.modes.ar import ArMode
from serving.spelling import Spelling
from stages.alphabet import Alphabet
from stages.bundle import find_bundle
from stages.errors import InputError, OnesweepError
from stages.manifest import read_manifest
from stages.parts import plan_host
from stages.pieces import MAX_PIECES, room_for
from stages.sweep import PIECE_POSITIONS

TRIES = 200
"""Places of a text where a prompt of the very length is looked for: a cut may change the last symbols."""


@dataclass(frozen=True)
class FirstTokenSettings:
    """What is measured."""

    profile: Profile
    checkpoint: Path
    prompt_symbols: int = 1000
    text: Path | None = None
    """Where the prompt is from; None = text that comes with Python."""
    requests: int = 5
    """Of each arm, after one that warms up."""
    codecs: tuple[str, ...] = (ArMode.default_codec,)

    @property
    def hosts(self) -> int:
        """Three, or one for each stage where there are fewer."""
        return min(DEFAULT_HOSTS, plan_host(self.checkpoint, (0,)).parts)

    def arms(self) -> list[Arm]:
        return [Arm(codec, most) for codec in self.codecs for most in (MAX_PIECES, 1)]


@dataclass(frozen=True)
class Arm:
    """Requests that differ in nothing but their turn."""

    codec: str
    most_pieces: int
    """Hops that a prompt travels in at most."""


def prompt_for(settings: FirstTokenSettings) -> tuple[str, Alphabet]:
    """The prompt, and the symbols that it is counted in. Raises OnesweepError for what cannot be measured."""
    if settings.requests < 1:
        raise InputError(f"--requests must be at least 1, not {settings.requests}")
    for codec in settings.codecs:
        if codec not in ArMode.codecs:
            raise InputError(f"unknown codec {codec!r}; choose from {', '.join(ArMode.codecs)}")
    directory = find_bundle(settings.checkpoint).ar
    if directory is None:
        raise InputError(f"{settings.checkpoint} has no AR model: prompts of other modes travel in one sweep")
    positions = read_manifest(directory).architecture.positions
    most = min(positions - 1, room_for(positions))
    if not PIECE_POSITIONS < settings.prompt_symbols <= most:
        raise InputError(
            f"--prompt-tokens must be {PIECE_POSITIONS + 1} to {most}, not {settings.prompt_symbols}: "
            "shorter ones are one piece, longer ones do not fit one hop"
        )
    settings.profile.check_hosts(settings.hosts)
    spelling = spelling_of(directory)
    prompt = _cut(_text(settings.text), settings.prompt_symbols, spelling)
    if problem := lab_problem():
        raise OnesweepError(problem)
    return prompt, spelling.alphabet


def _text(path: Path | None) -> str:
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics.values())
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from None


def _cut(text: str, count: int, spelling: Spelling) -> str:
    """A part of `text` that is `count` symbols long. Raises InputError where none was found."""
    if len(spelled(spelling, text[: 64 * count].encode())) < count:
        raise InputError(f"the text is shorter than {count} {spelling.noun}: give a longer one with --text")
    for start in range(TRIES):
        low, high = 0, min(64 * count, len(text) - start)
        while low < high:  # the shortest part with at least so many
            middle = (low + high) // 2
            if len(spelled(spelling, text[start : start + middle].encode())) < count:
                low = middle + 1
            else:
                high = middle
        prompt = text[start : start + low]
        if len(spelled(spelling, prompt.encode())) == count:
            return prompt
    raise InputError(f"found no part of the text with exactly {count} {spelling.noun}: give another one with --text")
