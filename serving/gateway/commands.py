"""The command `http`."""

import argparse

from serving.gateway.settings import HttpSettings
from stages.settings import add_flags, from_flags
from stages.telemetry.observability import ObservabilitySettings, start_log
from stages.wire.web_access import check_framework


def add_http(http: argparse.ArgumentParser) -> None:
    add_flags(http, HttpSettings)
    add_flags(http, ObservabilitySettings, only=("metrics", "log_format"))


def run_http(options: argparse.Namespace) -> int:
    from serving.cli.deployment import router_here

    check_framework("`onesweep http`")
    from serving.gateway.app import serve

    options.router, _ = router_here(options.router)
    settings = from_flags(HttpSettings, options, seeing=from_flags(ObservabilitySettings, options))
    start_log(settings.seeing.log_format, "http")
    serve(settings)
    return 0
