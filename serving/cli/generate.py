"""The commands `generate` and `compare`, and the options of all commands that send requests to a router."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

from serving.cli.parser import prompt_of, removed_hint
from serving.client.result import HostsLost, Result, unready_words
from serving.client.variants import all_variants, comparison, parse_variants, run_variants
from serving.modes import COPY, MODES, NO_COPY, WITHOUT_HOSTS
from serving.router.request import DEFAULT_ROUTER, DEFAULT_TIMEOUT_S, ROUTER_HELP, SETTINGS, Request, mode_problem
from stages.errors import InputError, ServiceError, one_of, printable, quoted
from stages.progress import ProgressLine, counted, ticking
from stages.settings import add_flags
from stages.signals import run_interruptible
from stages.wire.secret_files import add_client_options, add_token_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serving.client.client import AsyncClient, Client
    from serving.router.topology import Topology

# A command imports modules that need gRPC only when it runs.

WAIT_S, ANSWER_S = 120.0, 2.0
LOST_WAIT_S = 5.0  # a router's own wait for a host, which is enough for a restart


def add_router_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--router", metavar="HOST:PORT", help=ROUTER_HELP)
    add_client_options(parser)
    add_token_options(parser)


def add_wait(parser: argparse.ArgumentParser) -> None:
    what = "for a router that is not up yet, or whose hosts load weights (120 for the latter)"
    parser.add_argument("--wait", type=float, metavar="S", help=what)


def wait_ready(options: argparse.Namespace, *modes: str | None) -> None:
    """Return when the router can serve these modes, or after --wait; its answer to a request then says why not.

    Without --wait, there is no wait if no router answers and none was started here, if it wants another token, or if no
    machine holds some blocks, and at most LOST_WAIT_S for a host that does not run. Raises OnesweepError if a request
    would learn no more."""
    from serving.cli.deployment import NO_HOLDER, NO_TOKEN, SILENT, NoDeployment, answers_of, deployment_here
    from serving.cli.machines import served_here
    from serving.cli.servers import ROUTER

    wait_s = WAIT_S if options.wait is None else options.wait
    if not wait_s >= 0:
        raise InputError(f"--wait must be 0 or more seconds, not {wait_s}")
    max_s = min(wait_s, getattr(options, "timeout_s", wait_s)) if options.wait is None else wait_s
    deadline, answer_s = time.monotonic() + max_s, min(ANSWER_S, max_s or ANSWER_S)
    here = deployment_here(options.router)
    can_wait = options.wait is not None or (here is not None and ROUTER not in here.ended())
    give_up_at = math.inf
    with client_of(options) as client, closing(ProgressLine()) as progress:
        for reason in answers_of(client, answer_s):
            # any answering router serves the modes without hosts, and perhaps a text within a budget
            alone = reason not in (None, SILENT) and modes and {*modes} <= {*WITHOUT_HOSTS}
            has_budget = isinstance(reason, HostsLost) and getattr(options, "budget_ms", None)
            if reason in ("", NO_TOKEN) or alone or has_budget:
                return
            why = reason or served_here(options.router)
            give_up_at = min(give_up_at, time.monotonic() + LOST_WAIT_S) if isinstance(why, HostsLost) else math.inf
            is_lost = time.monotonic() > give_up_at and options.wait is None
            is_hopeless = (reason is None and not can_wait) or (NO_HOLDER in why and options.wait is None) or is_lost
            if time.monotonic() < deadline and not is_hopeless:
                progress.at(f"waiting for the router at {client.address}: {why or 'it does not answer yet'}")
            elif why and reason is None:
                raise NoDeployment(why)
            elif NO_HOLDER in why or is_lost:
                raise ServiceError(f"the router at {client.address} cannot answer requests now: {why}")
            elif reason == SILENT:
                why = "the router's machine or name server is out of reach, another program has its port, or it hangs"
                raise ServiceError(f"no answer from {client.address} in {max(max_s, answer_s):g} s: {why}")
            else:
                return


def client_of(options: argparse.Namespace) -> Client:
    """A client of the router that the options name. Raises InputError."""
    from serving.client.client import Client

    return Client(**_connection(options))


def async_client_of(options: argparse.Namespace) -> AsyncClient:
    """Like `client_of`, for use inside an event loop."""
    from serving.client.client import AsyncClient

    return AsyncClient(**_connection(options))


def _connection(options: argparse.Namespace) -> dict[str, Any]:
    from stages.wire.tls import security_of
    from stages.wire.tokens import token_of

    address, topology = router_here(options.router)
    security = security_of(options, topology.client_tls if topology else None)
    # else looked up with each call: a router that `serve` restarts may want another
    token = token_of(options, address, security.tls) if options.token_file else None
    return {"address": address, "tls": security.tls, "token": token, "insecure": security.insecure}


def router_here(given: str | None) -> tuple[str, Topology | None]:
    """`given`, else the router that is up here, else that of `serve` or the default address; with its topology, if it
    is up here."""
    from serving.cli.deployment import deployment_here
    from serving.cli.machines import serving_here

    deployment = deployment_here(given)
    topology = deployment.topology if deployment else None
    return given or (topology.router if topology else serving_here().get("router", DEFAULT_ROUTER)), topology


def add_generate(generate: argparse.ArgumentParser) -> None:
    _add_request(generate)
    generate.add_argument("--mode", default=Request.mode, metavar="M", help=f"{', '.join(MODES)} ({Request.mode})")


def add_compare(compare: argparse.ArgumentParser) -> None:
    _add_request(compare)
    compare.add_argument("--modes", metavar="M[,M]", help="such as ar,sweep:steps=16 (all served modes)")


def _add_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", type=prompt_of, metavar="PROMPT", help="- reads standard input")
    add_router_options(parser)
    add_wait(parser)
    add_flags(parser, Request)
    parser.set_defaults(seed=0)
    parser.add_argument("--timeout-s", type=float, default=DEFAULT_TIMEOUT_S, metavar="S", help="deadline (120)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def check_request(mode: str | None, **settings: Any) -> None:  # noqa: ANN401 - a request's settings
    """Raise InputError for settings that no router accepts, before anything is started or waited for."""
    if mode is not None and mode not in MODES:
        raise InputError(f"unknown mode {quoted(mode)}{removed_hint(mode)}{one_of(mode, MODES)}")
    if settings.get("prompt") == "":
        raise InputError("the prompt is empty: give at least one byte of text")
    Request(mode=mode or "", **settings).message()


def run_generate(options: argparse.Namespace) -> int:
    check_request(options.mode, prompt=options.prompt, **_request_settings(options))
    wait_ready(options, options.mode)
    # not the blocking client: if an exception leaves it while it starts a call, it waits in the end for that call's
    # deadline
    return run_interruptible(_generate(options))


async def _generate(options: argparse.Namespace) -> int:
    from serving.client.client import TextDecoder

    settings = _request_settings(options) | {"timeout_s": options.timeout_s}
    async with async_client_of(options) as client:
        with ExitStack() as waiting:
            if options.mode == COPY:
                waiting.enter_context(ticking("waiting for the first text; a router loads the copy on first use"))
            if options.json:
                print(json.dumps((await client.generate(options.prompt, mode=options.mode, **settings)).as_json()))
                return 0
            decoder = TextDecoder()
            async for item in client.stream(options.prompt, mode=options.mode, **settings):
                waiting.close()
                if isinstance(item, Result):
                    print(printable(decoder.end(), newline="\n"), flush=True)
                    print("\n".join(cost_lines(item)), file=sys.stderr)
                else:
                    print(printable(decoder.feed(item), newline="\n"), end="", flush=True)
    return 0


def run_compare(options: argparse.Namespace) -> int:
    variants = None if options.modes is None else [*parse_variants(options.modes, MODES)]
    settings = _request_settings(options)
    check_request(None, prompt=options.prompt, **settings)
    wait_ready(options, *(variant.mode for variant in variants or ()))
    with client_of(options) as client:
        if variants is None:
            status = client.status()
            if not status.ready:
                why = unready_words(status) or "it has no hosts"
                raise ServiceError(f"cannot compare modes, the router is not ready: {why}")
            if status.HasField("pictures"):
                raise ServiceError("this model writes no text: compare its pictures with `onesweep draw --compare`")
            variants = all_variants(status, options.scorer)
            if COPY not in status.modes:
                print(f"{COPY} is skipped: {NO_COPY}", file=sys.stderr)
        for name, value in settings.items():  # a setting that only some variants accept is dropped for the others
            given = {"max_distance": settings.get("max_distance"), name: value}
            if all(problems := [mode_problem(variant.mode, given) for variant in variants]) and problems:
                raise InputError(problems[0])
        outcomes = run_variants(client, options.prompt, variants, settings | {"timeout_s": options.timeout_s})
    if options.json:
        rows = {m: {"mode": m, "error": o} if isinstance(o, str) else o.as_json() for m, o in outcomes.items()}
        print(json.dumps(list(rows.values())))
    else:
        print(comparison(options.prompt, outcomes))
    return 0 if all(not isinstance(outcome, str) for outcome in outcomes.values()) else 1


def _request_settings(options: argparse.Namespace) -> dict[str, Any]:
    return {f.name: getattr(options, f.name) for f in SETTINGS if "flag" in f.metadata}


def cost_lines(result: Result) -> Iterator[str]:
    """Yield the cost of a text in one or more lines, and the reason for its mode."""
    tokens = f" in {result.output_tokens} tokens" if result.output_tokens != result.output_bytes else ""
    drafts = f", {result.accepted} of {result.drafted} draft tokens accepted" if result.drafted else ""
    cached = f", {result.cached_tokens} of {result.prompt_tokens} prompt tokens cached"
    yield (
        f"[{result.mode}, seed {result.seed}, {result.sampling}: {result.output_bytes} bytes{tokens}{drafts}, "
        f"{counted(result.sweeps, 'sweep')}, {result.hops} hops, {result.wire_bytes_total} bytes on the wire, "
        f"{result.latency_ms:.0f} ms, {result.compute_ms:.0f} ms of compute{cached if result.cached_tokens else ''}]"
    )
    if bound := result.distance_bound:
        distance = f"<= {bound:.2f}" if bound < 1 else "unknown"
        yield (
            f"[{result.candidates} candidates, {result.effective_samples:.1f} effective; distance of the text from the "
            f"distribution of {result.scorer}: {distance}, in total variation, as the weights estimate it]"
        )
    if result.reason:
        yield f"[{result.reason}]"
