"""What a server's operator can see of it: the options of metrics, traces and logs, for hosts and router alike."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from stages.errors import InputError
from stages.log import LOG_FORMATS, LogFormat, check_log_format

DEFAULT_SHARE = 0.01


@dataclass(frozen=True)
class SeeingSettings:
    """What is off where it is None."""

    metrics: str | None = None
    """Where metrics are served: HOST:PORT."""
    traces: str | None = None
    """Where spans go: HOST:PORT or https://HOST:PORT of a collector, or file:PATH."""
    trace_share: float = DEFAULT_SHARE
    """Of all requests; the router draws lots."""
    log_format: LogFormat = "text"


def add_seeing(parser: argparse.ArgumentParser, *, traces: bool = True, share: bool = False) -> None:
    """:param traces: with the option of those that make spans.
    :param share: with the option that only a router has."""
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve Prometheus metrics there")
    if traces:
        parser.add_argument("--traces", metavar="TARGET", help="send spans to [https://]HOST:PORT (OTLP), or file:PATH")
    if share:
        parser.add_argument("--trace-share", type=float, metavar="S", help=f"requests to trace ({DEFAULT_SHARE})")
    parser.add_argument("--log-format", default="text", metavar="F", help=f"{', '.join(LOG_FORMATS)} (text)")


def seeing_of(options: argparse.Namespace) -> SeeingSettings:
    """Raises InputError. Addresses are checked where they are used."""
    traces, share = getattr(options, "traces", None), getattr(options, "trace_share", None)
    if share is not None and traces is None:
        raise InputError("--trace-share says how many requests are traced: give --traces, too")
    if share is not None and not 0 <= share <= 1:  # false for NaN too
        raise InputError(f"--trace-share must be 0 to 1, not {share}")
    return SeeingSettings(
        options.metrics,
        traces,
        DEFAULT_SHARE if share is None else share,
        check_log_format(options.log_format),
    )
