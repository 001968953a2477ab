"""Lines of a server's log, and its options."""

import argparse
import json
import logging
import re

import pytest

from stages.errors import InputError
from stages.telemetry.observability import (
    JsonLines,
    ObservabilitySettings,
    TextLines,
    add_observability,
    observability_of,
)


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


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_observability(parser, share=True)
    return parser.parse_args(arguments)


def test_options_become_settings() -> None:
    given = ("--metrics", "127.0.0.1:9100", "--traces", "file:x", "--trace-share", "1", "--log-format", "json")
    assert observability_of(options(*given)) == ObservabilitySettings("127.0.0.1:9100", "file:x", 1.0, "json")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("--log-format", "xml"), "unknown --log-format 'xml'; choose from text, json"),
        (("--trace-share", "0.5"), "give --traces, too"),
        (("--traces", "file:x", "--trace-share", "1.5"), "--trace-share must be 0 to 1, not 1.5"),
        (("--traces", "file:x", "--trace-share", "nan"), "--trace-share must be 0 to 1, not nan"),
    ],
)
def test_options_that_are_refused(given: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        observability_of(options(*given))


def test_a_message_is_one_line() -> None:
    assert TextLines("%(levelname)s %(message)s").format(record()) == 'WARNING a "host" line'
