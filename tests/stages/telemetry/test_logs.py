"""Lines of a server's log."""

import json
import logging
import re

from stages.telemetry.observability import JsonLines, TextLines


def record(**more: object) -> logging.LogRecord:
    return logging.getLogger("stages.host.host").makeRecord(
        "stages.host.host", logging.WARNING, "f", 1, 'a "%s"\nline', ("host",), None, extra=more or None
    )


def test_a_json_line_is_one_object_with_the_known_fields() -> None:
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


def test_a_message_is_one_line() -> None:
    assert TextLines("%(levelname)s %(message)s").format(record()) == 'WARNING a "host" line'
