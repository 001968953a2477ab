"""Commands that ask a router: `generate` and `compare`, and the options of every command that does."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from onesweep.serving.client.comparison import all_entrants, comparison, named_entrants, run_entrants, titled
from onesweep.serving.client.result import Result
from onesweep.serving.modes import MODES
from onesweep.serving.router.request import DEFAULT_TIMEOUT_S, ROUTER_HELP, SETTINGS, Request
from onesweep.stages.errors import ServiceError, printable
from onesweep.stages.settings import add_flags, check_destination, write_destination
from onesweep.stages.signals import run_interruptible
from onesweep.stages.wire.flags import add_client_options, add_token_options

if TYPE_CHECKING:
    from onesweep.serving.client.client import AsyncClient, Client
    from onesweep.stages.wire.tls import Tls

# Modules that need gRPC are imported when a command runs.


class Credentials(TypedDict):
    """Settings of a client."""

    tls: Tls | None
    token: str
    insecure: bool


def add_router_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--router", metavar="HOST:PORT", help=ROUTER_HELP)
    add_client_options(parser)
    add_token_options(parser)


def client_of(options: argparse.Namespace) -> Client:
    """A client of the router that the options name. Raises InputError."""
    from onesweep.serving.client.client import Client

    address, who = _connection(options)
    return Client(address, **who)


def async_client_of(options: argparse.Namespace) -> AsyncClient:
    """Like `client_of`, where an event loop runs."""
    from onesweep.serving.client.client import AsyncClient

    address, who = _connection(options)
    return AsyncClient(address, **who)


def _connection(options: argparse.Namespace) -> tuple[str, Credentials]:
    from onesweep.serving.cli.deployment import router_here
    from onesweep.stages.wire.tls import security_of
    from onesweep.stages.wire.tokens import token_of

    address, topology = router_here(options.router)
    security = security_of(options, topology.client_tls if topology else None)
    token = token_of(options, address, security.tls)
    return address, {"tls": security.tls, "token": token, "insecure": security.insecure}


def add_generate(generate: argparse.ArgumentParser) -> None:
    _add_request(generate)
    generate.add_argument("--mode", default=Request.mode, metavar="M", help=f"{', '.join(MODES)} ({Request.mode})")
    generate.add_argument("--stream", action="store_true", help="print pieces as they arrive")
    generate.add_argument("--json", action="store_true", help="print JSON")
    generate.add_argument("--receipt", type=Path, metavar="FILE", help="write what the hosts sign of the text there")


def add_compare(compare: argparse.ArgumentParser) -> None:
    _add_request(compare)
    compare.add_argument("--modes", metavar="M[,M]", help="such as ar,resample:scorer (all that can be served)")
    compare.add_argument("--json", action="store_true", help="print JSON")
    compare.add_argument("--html", type=Path, metavar="FILE", help="write the texts and figures there, too")


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT")
    add_router_options(parser)
    add_flags(parser, Request)
    parser.set_defaults(seed=0, suffix="")
    parser.add_argument("--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="deadline (120)")


def run_generate(options: argparse.Namespace) -> int:
    # not by the blocking client: left by an exception while it starts a call, it waits at its end for that call's
    # deadline
    return run_interruptible(_generate(options))


async def _generate(options: argparse.Namespace) -> int:
    from onesweep.serving.client.client import TextDecoder

    settings = _request_settings(options)
    if options.receipt is not None:
        check_destination(options.receipt, "--receipt")
        settings["receipt"] = True
    async with async_client_of(options) as client:
        if options.stream and not options.json:
            decoder = TextDecoder()
            async for item in client.stream(options.prompt, mode=options.mode, **settings):
                if isinstance(item, Result):
                    print(printable(decoder.end(), newline="\n"), flush=True)
                    result = item
                else:
                    print(printable(decoder.feed(item), newline="\n"), end="", flush=True)
        else:
            result = await client.generate(options.prompt, mode=options.mode, **settings)
            print(json.dumps(result.as_json()) if options.json else printable(result.text, newline="\n"))
    if not options.json:
        _print_cost(result)
    if options.receipt is not None and result.receipt is not None:
        from google.protobuf.json_format import MessageToJson

        write_destination(options.receipt, MessageToJson(result.receipt))
    return 0


def run_compare(options: argparse.Namespace) -> int:
    entrants = None if options.modes is None else named_entrants(options.modes)
    settings = _request_settings(options)
    Request(prompt=options.prompt, suffix=options.suffix).message()
    if options.html:
        check_destination(options.html, "--html")
    with client_of(options) as client:
        if entrants is None:
            status = client.status()
            if not status.ready:
                reasons = "; ".join(host.reason for host in status.hosts if host.reason) or "no host has registered"
                raise ServiceError(f"nothing can be compared, the router is not ready: {reasons}")
            if status.HasField("pictures"):
                raise ServiceError("there is no text to compare: ask for pictures with `onesweep draw --compare`")
            entrants = all_entrants(status.modes, options.scorer, options.suffix)
        outcomes = run_entrants(client, options.prompt, entrants, settings)
    print_outcomes(options.prompt, options.suffix, outcomes, options.json)
    if options.html:
        write_destination(options.html, comparison_page(options.prompt, options.suffix, outcomes, settings))
    return 0 if all(not isinstance(outcome, str) for outcome in outcomes.values()) else 1


def _request_settings(options: argparse.Namespace) -> dict[str, Any]:
    names = [f.name for f in SETTINGS if "flag" in f.metadata]
    return {name: getattr(options, name) for name in (*names, "timeout_s")}


def print_outcomes(prompt: str, suffix: str, outcomes: dict[str, Result | str], as_json: bool) -> None:
    if as_json:
        rows = {m: {"mode": m, "error": o} if isinstance(o, str) else o.as_json() for m, o in outcomes.items()}
        print(json.dumps(list(rows.values())))
    else:
        print(comparison(prompt, outcomes, suffix))


def _tokens(result: Result) -> str:
    """Nothing where tokens are bytes."""
    return f" in {result.output_tokens} tokens" if result.output_tokens != result.output_bytes else ""


def _cached(result: Result) -> str:
    """Nothing where the hosts had nothing of the prompt in memory."""
    told = f", {result.cached_tokens} of {result.prompt_tokens} prompt tokens from memory"
    return told if result.cached_tokens else ""


def _print_cost(result: Result) -> None:
    print(
        f"[{result.mode}, seed {result.seed}: {result.output_bytes} bytes{_tokens(result)}, "
        f"{result.sweeps} sweeps, {result.hops} hops, {result.wire_bytes_total} bytes on the wire, "
        f"{result.latency_ms:.0f} ms, {result.compute_ms:.0f} ms of compute{_cached(result)}]",
        file=sys.stderr,
    )
    if distance := _distance(result):
        print(
            f"[{result.candidates} candidates, {result.effective_samples:.1f} effective; distance of the text from the "
            f"distribution of {result.scorer}: {distance}, in total variation, as the weights estimate it]",
            file=sys.stderr,
        )
    if result.reason:
        print(f"[{result.reason}]", file=sys.stderr)


# Results side by side: one HTML file that needs no other.

_STYLE = """
:root { color-scheme: light dark; --line: #8a93a055; --bad: #c0392b; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a7a; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1068px; margin: 2rem auto; padding: 0 1rem;
  background: Canvas; color: CanvasText; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin: 0 0 .4rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .83rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
th { white-space: normal; vertical-align: bottom; }
th, td { text-align: right; padding: .25rem .32rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.texts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr)); gap: 1rem;
  margin: 1.5rem 0; }
article { border: 1px solid var(--line); border-radius: .4rem; padding: .8rem; }
p.text { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .85rem/1.45 ui-monospace, monospace; }
.given { opacity: .55; } .bad { color: var(--bad); } .small { font-size: .82rem; opacity: .8; }
code { font: .85rem ui-monospace, monospace; overflow-wrap: anywhere; }
"""

_COLUMNS = (
    "mode", "latency ms", "first byte ms", "sweeps", "hops", "wire bytes", "host-seconds", "compute ms", "scorer",
    "chunk", "candidates", "effective", "distance", "accepted", "KL bits a token",
)  # fmt: skip

_READING = """Latency is the router's, from admission to the last byte. Wire bytes are the payload of all hops of all
sweeps. Host-seconds and compute are arithmetic, on the hosts and in all. Effective: of the candidates, as their weights
leave them. Distance: of the text from the scorer's distribution, at most, in total variation, as the weights estimate
it; unknown where one candidate had nearly all the weight. Accepted: share of the guesses that counted. KL: of drafter
and scorer. The sign &#xFFFD; stands for bytes that are no UTF-8, and for control characters."""


def comparison_page(prompt: str, suffix: str, outcomes: dict[str, Result | str], settings: dict[str, Any]) -> str:
    """The whole page.

    :param outcomes: for each mode its Result, or the sentence that says why there is none.
    :param settings: of the requests; those that are None were the router's to choose.
    """
    results = {label: outcome for label, outcome in outcomes.items() if isinstance(outcome, Result)}
    given = {name: value for name, value in settings.items() if value is not None and value != ""}
    rows = [_row(label, result) for label, result in results.items()]
    # a column that says nothing of any mode would only make the table wider
    told = [i for i in range(len(_COLUMNS)) if any(row[i] != "-" for row in rows)]
    made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, onesweep {version('onesweep')}"
    parts = [
        "<h1>onesweep: one prompt, several modes</h1>",
        f'<p class="small">{made}: <code>{_shown(_command(prompt, list(outcomes), given))}</code></p>',
        f"<p>Given: <code>{_shown(prompt)}</code>" + (f" … <code>{_shown(suffix)}</code>" if suffix else "") + "</p>",
        _table([_COLUMNS[i] for i in told], [[row[i] for i in told] for row in rows]),
        '<div class="texts">' + "".join(_card(prompt, suffix, *pair) for pair in outcomes.items()) + "</div>",
        f'<p class="small">{_READING}</p>',
        _table(("setting", "value"), [(name, _plain(str(value))) for name, value in given.items()]),
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>onesweep compare</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _command(prompt: str, labels: Sequence[str], given: dict[str, Any]) -> str:
    """The command line that makes such a page again, without the router's address and the token."""
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return shlex.join(["onesweep", "compare", prompt, "--modes", ",".join(labels), *flags])


def _row(label: str, result: Result) -> tuple[str, ...]:
    acceptance = result.acceptance
    return (
        titled(label, result),
        f"{result.latency_ms:.1f}",
        f"{result.first_byte_ms:.1f}",
        str(result.sweeps),
        str(result.hops),
        f"{result.wire_bytes_total:,}",
        f"{result.host_seconds:.3f}",
        f"{result.compute_ms:.1f}",
        result.scorer or "-",
        str(result.chunk or "-"),
        str(result.candidates or "-"),
        f"{result.effective_samples:.1f}" if result.effective_samples else "-",
        _distance(result) or "-",
        "-" if acceptance is None else f"{acceptance:.2f}",
        f"{result.divergence_bits:.3f}" if result.divergence_bits else "-",
    )


def _distance(result: Result) -> str:
    """The bound on the distance from the scorer's distribution; empty where the mode has none."""
    bound = result.distance_bound
    return "" if not bound else f"<= {bound:.2f}" if bound < 1 else "unknown"


def _card(prompt: str, suffix: str, label: str, outcome: Result | str) -> str:
    if isinstance(outcome, str):
        return f'<article><h2>{_shown(label)}</h2><p class="bad">{_shown(outcome)}</p></article>'
    after = f'<span class="given">{_shown(suffix)}</span>' if outcome.mode == "infill" else ""
    reason = f'<p class="small">{_shown(outcome.reason)}</p>' if outcome.reason else ""
    return (
        f'<article><h2>{_shown(titled(label, outcome))}</h2><p class="text"><span class="given">{_shown(prompt)}</span>'
        f'{_shown(outcome.text)}{after}</p>{reason}<p class="small">seed {outcome.seed}, {outcome.output_bytes} bytes'
        f"</p></article>"
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(line(cells, "td") for cells in rows)
    return f'<div class="wide"><table><thead>{line(header, "th")}</thead><tbody>\n{body}\n</tbody></table></div>'


def _plain(text: str) -> str:
    return printable(text, newline="\n")


def _shown(text: str) -> str:
    """Text that is safe in HTML."""
    return escape(_plain(text))
