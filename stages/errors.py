"""Errors for people: the message says what was wrong and what to do, without a traceback.

WordedError                its message is for people; also StatusError of stages/wire/status.py
+- OnesweepError           exit 1
   +- InputError           exit 2: a value that a user gave
   |  +- ShapeError        an architecture
   |  +- CodecError        a codec's name or payload
   |  +- RequestError      a field of a request or message
   |  +- DataError         training text
   |  +- ConfigError       a file of settings, and the values in it
   +- CheckpointError      files that cannot be loaded or saved
   |  +- MissingCheckpoint a missing checkpoint; exit 2, as a restarted service would not find it either
   |  +- StalePart         a file whose beginning belonged to another; it was removed
   +- ResumeError          a training state that cannot be resumed
   +- Interrupted          asked to stop, state saved; exit 130
   +- ServiceError         a server answered with an error, or not at all
"""

import errno
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Errors of the machine, which may pass: exit 1, whatever value a user gave.
PASSING_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
SIMILARITY_CUTOFF = 0.65  # from 0 to 1: below this, a guess at a word is more often wrong than right


class WordedError(Exception): ...


class OnesweepError(WordedError):
    exit_code = 1


class InputError(OnesweepError):
    exit_code = 2


class ShapeError(InputError): ...


class CodecError(InputError): ...


class RequestError(InputError): ...


class DataError(InputError): ...


class ConfigError(InputError): ...


class CheckpointError(OnesweepError): ...


class MissingCheckpoint(CheckpointError):
    exit_code = 2


class StalePart(CheckpointError): ...


class ResumeError(OnesweepError): ...


class Interrupted(OnesweepError):
    exit_code = 130


class ServiceError(OnesweepError): ...


def exit_code_of(error: OnesweepError) -> int:
    """The exit code of a command that ends with `error`: its class's, unless an error of the machine led to it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in PASSING_ERRORS:
            return OnesweepError.exit_code
        cause = cause.__context__  # set even where `from None` keeps it out of a traceback
    return error.exit_code


def printable(text: str, newline: str = "⏎") -> str:
    """Make text unable to move the cursor, colour the screen or forge a line: control characters become symbols."""
    if text.isprintable():
        return text
    return "".join(newline if c == "\n" else c if c.isprintable() else "�" for c in text)


def quoted(text: str) -> str:
    """A foreign word for an error message: in quotes, and truncated if long."""
    return repr(text if len(text) <= 40 else f"{text[:40]}…")


def regular(path: Path) -> Path:
    """`path`, to be opened. Raises CheckpointError for a FIFO, socket or device: opening it might wait forever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise CheckpointError(f"{path} is not a regular file: put the file itself there")
    return path


def exists(path: Path) -> bool:
    """Like `path.exists()`, which from Python 3.14 on is also false where nobody may look. Raises OSError there."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return bool(path.stat())
    return False


def close_to(word: str, known: Iterable[str]) -> str:
    """For an error about an unknown word: " (did you mean sweep?)", or nothing if no known one is similar."""
    import difflib  # errors are rare, and every command imports this module

    word = word.lstrip("-")  # dashes would make options similar
    names = {name.lstrip("-"): name for name in known if name.lstrip("-")[:1] == word[:1]}
    begun = [name for name in names if word and name.startswith(word)]
    found = [names[name] for name in begun[:2] or difflib.get_close_matches(word, names, 2, SIMILARITY_CUTOFF)]
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def one_of(word: str, known: Iterable[str], listed: str = "choose from") -> str:
    """`close_to`, followed by all of `known`: " (did you mean sweep?); choose from sweep, ar"."""
    names = list(known)
    return f"{close_to(word, names)}; {listed} {', '.join(names)}"


@contextmanager
def library_errors(made: Callable[[str], Exception]) -> Iterator[None]:
    """A `with` block whose failures raise `made` with their words. The package tokenizers raises Exception itself. Its
    panics, such as a regular expression that gives up on a text, are not even of that class."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise made(str(error)) from None


@contextmanager
def file_errors(kind: type[OnesweepError], what: str = "", advice: str = "") -> Iterator[None]:
    """A `with` block that rewords OSErrors, as in "cannot write PATH: No space left on device; free some space".

    :param what: the words before the system's, by default "cannot read PATH"; advice: the words after them.
    """
    try:
        yield
    except OSError as error:
        words = f"{error.strerror or error}".partition(" (while ")[0]  # Python adds the address that a socket is for
        raise kind(f"{what or f'cannot read {error.filename}'}: {words}{advice and f'; {advice}'}") from None
