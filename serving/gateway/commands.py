"""The command `http`, and the settings of the gateway that it starts."""

import argparse

from serving.gateway.settings import HttpSettings
from stages.host.commands import add_drain_flag, check_positive
from stages.settings import add_flags, from_flags
from stages.telemetry.observability import add_observability, observability_of, start_log
from stages.wire.web_access import check_framework


def add_http(http: argparse.ArgumentParser) -> None:
    add_flags(http, HttpSettings)
    add_observability(http, traces=False)
    add_drain_flag(http)


def run_http(options: argparse.Namespace) -> int:
    from serving.cli.deployment import router_here

    check_framework("`onesweep http`")
    check_positive(options, "drain_s")
    from serving.gateway.app import serve

    seeing = observability_of(options)
    options.router, _ = router_here(options.router)
    settings = from_flags(HttpSettings, options, seeing=seeing, drain_s=options.drain_s)
    start_log(seeing.log_format, "http")
    serve(settings)
    return 0
