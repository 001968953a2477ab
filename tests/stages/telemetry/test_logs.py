"""Lines of a server's log, and its options."""

import argparse
import json
import logging
import re

import pytest

from stages.errors import InputError
from stages.settings import add_flags, from_flags
from stages.telemetry.observability import JsonLines, ObservabilitySettings, TextLines


def record(**more: object) -> logging.LogRecord:
    return logging.getLogger("stages.host.host").makeRecord(
        "stages.host.host", logging.WARNING, "f", 1, 'a "%s"\nline', ("host",), None, extra=more or None
    )


def test_a_line_is_one_object_with_what_is_known() -> None:
    line = JsonLines("paris").format(record(request="cafe", session="", ms=1.5, other="not listed"))
    assert "\n" not in line
    entry = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry.pop("time"))
    assert entry == {
        "level": "WARNING",
        "logger": "stages.host.host",
        "name": "paris",
        "message": 'a "host"\nline',
        "request": "cafe",
        "ms": 1.5,
    }


def test_an_exception_is_part_of_its_line() -> None:
    entry = record()
    try:
        raise ValueError("it broke")
    except ValueError as error:
        entry.exc_info = (ValueError, error, error.__traceback__)
    assert json.loads(JsonLines("paris").format(entry))["exception"].endswith("ValueError: it broke")


def sets(*words: str) -> tuple[str, ...]:
    return tuple(each for word in words for each in ("--set", word))


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser, ObservabilitySettings)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (sets("log_format=xml"), "unknown log_format 'xml'; choose from text, json"),
        (sets("log_form=json"), "--set log_form=json: unknown setting 'log_form' .did you mean log_format"),
    ],
)
def test_options_that_are_refused(given: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        from_flags(ObservabilitySettings, options(*given))


def test_a_message_is_one_line() -> None:
    assert TextLines("%(levelname)s %(message)s").format(record()) == 'WARNING a "host" line'
