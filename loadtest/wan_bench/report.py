"""The report: one HTML file with everything in it, readable on a light and on a dark screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.page import html_page, html_pairs, html_table, shown
from loadtest.wan_bench.pictures import (
    ablation_picture,
    latency_picture,
    parts_picture,
    ratio_picture,
    waterfall_picture,
)
from loadtest.wan_bench.rows import length_of, number, text_cells

_FLOOR = """The <b>floor</b> of a request is what these links and these hosts take whatever serves on them: the one-way
delays on its critical path, the payload's bits over the links' rate, and the arithmetic that the hosts (and a drafter)
booked for that very request. Not in it: TCP/IP and HTTP/2 headers, queues, gRPC, protobuf, Python, waiting for a
processor. <b>× floor</b> is the median of latency over floor, request by request."""

_READ = """What the very texts are worth, without a judge: <b>nats a token</b> is their loss under the served model
itself, each text after its own prompt, at temperature 1; <b>excess</b> what of it is above the entropy of that model's
odds at each place, 0 on average for what it draws itself at temperature 1; <b>entropy</b> and <b>4-gram</b> the bits of
their tokens and of runs of four, <b>distinct-2</b> the share of a text's pairs of words that are different: a low loss
can be bought with monotony. <b>As ar</b>: texts that are those of <code>ar</code> at the same seed. <b>Gap closed</b>:
of the way from the drafter's loss to that of <code>ar</code>. ±: a standard error over texts."""

_COLUMNS: tuple[tuple[str, str, int], ...] = (
    ("p50_ms", "p50 ms", 1),
    ("p95_ms", "p95 ms", 1),
    ("first_byte_ms", "first byte ms", 1),
    ("floor_ms", "floor ms", 1),
    ("ratio", "× floor", 2),
    ("tokens_per_s", "tokens/s", 1),
    ("sweeps", "sweeps", 0),
    ("hops", "hops", 0),
    ("wire_bytes", "wire bytes", 0),
    ("largest_hop_bytes", "largest hop", 0),
    ("host_seconds", "host-seconds", 3),
    ("acceptance", "accepted", 2),
    ("texts", "texts", 0),
)
_IN_A_LAB = "each in a network namespace, emulated links"
_TEXTS = ("nats a token", "excess", "entropy", "4-gram", "distinct-2", "as ar", "gap closed")


def report(record: dict[str, Any]) -> str:
    """The whole page, from the record of a run."""
    rows = record["rows"]
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    title = f"onesweep over a WAN: {', '.join(profiles)}"
    parts = [f"<h1>{shown(title)}</h1>", _origin(record), f"<p>{_FLOOR}</p>"]
    for profile in profiles:
        parts += [f"<h2>Profile {shown(profile)}</h2>", *_profile(rows, profile)]
    if record["sweep"]:
        parts.append(_waterfall(record["sweep"]))
    parts += ["<h2>Every arm</h2>", f"<p>{_READ}</p>", _table(rows), *_errors(rows)]
    if record["ablation"]:
        parts += _ablation(record["ablation"])
    if record["links"]:
        parts += _links(record)
    parts += ["<h2>Settings</h2>", html_pairs(record["settings"] | {"commit": record["commit"]} | record["machine"])]
    return html_page(title, parts)


def _origin(record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["machine"]
    return (
        f"<p>{settings['hosts']} hosts and a router on one machine ({shown(machine['processor'])}, "
        f"{machine['cores']} cores, {shown(machine['system'])}), {_IN_A_LAB if record['links'] else 'no lab'}; "
        f"{settings['requests']} turns of {settings['at_once']} requests an arm, seeds from {settings['seed']}; "
        f"commit <code>{shown(record['commit'][:12])}</code>.</p><pre>{shown(record['command'])}</pre>"
    )


def _profile(rows: Sequence[dict[str, Any]], profile: str) -> list[str]:
    if not any(row["profile"] == profile and row["p50_ms"] is not None for row in rows):
        return ["<p class='bad'>No request ended well.</p>"]
    return [
        _figure(
            latency_picture(rows, profile),
            f"Latency against output length on {profile}; dashed, the floor. Both axes are logarithmic.",
        ),
        _figure(ratio_picture(rows, profile), f"How far from the floor on {profile}: 1 cannot be beaten."),
        _figure(
            parts_picture(rows, profile),
            "What the latency is made of (medians). Rest: gRPC, Python, TCP, headers, waiting for a processor.",
        ),
    ]


def _waterfall(sweep: dict[str, Any]) -> str:
    what = (
        f"The request of median latency: {sweep['mode']}, {length_of(sweep)}, profile {sweep['profile']}, "
        f"seed {sweep['seed']}, {sweep['latency_ms']:.1f} ms. Delay and serialisation are the profile's; queue and "
        "compute were booked by the hosts; the rest is known only as a sum, so it stands at the end."
    )
    return f"<h2>One sweep, hop by hop</h2>{_figure(waterfall_picture(sweep), what)}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["profile", "text", "mode", "length", "idle s", *(name for _, name, _ in _COLUMNS)]
    head += [*_TEXTS, "requests", "failed"]
    body = []
    for row in rows:
        cells = [*(shown(row[key]) for key in ("profile", "text", "mode")), length_of(row), f"{row['idle_s']:g}"]
        cells += [number(row[key], digits) for key, _, digits in _COLUMNS]
        cells += text_cells(row)
        failed = f"<span class='bad'>{row['failures']}</span>" if row["failures"] else "0"
        body.append([*cells, str(row["requests"]), failed])
    return html_table(head, body, text_columns=4)


def _errors(rows: Sequence[dict[str, Any]]) -> list[str]:
    failed = [row for row in rows if row["failures"]]
    return [
        f"<p class='bad'>{shown(row['profile'])}, {shown(row['mode'])}, {length_of(row)}: "
        f"{row['failures']} of {row['requests']} requests failed, such as: {shown(row['error'])}</p>"
        for row in failed
    ]


def _ablation(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = ["measure", "change", "mode", "length", "idle s", "at once", "base p50 ms", "p50 ms", "difference ms"]
    head += ["middle half", "less compute ms", "× base", "base wire bytes", "wire bytes", "same text", "failed"]
    body = []
    for row in rows:
        quartiles = row["difference_quartiles_ms"]
        body.append(
            [
                *(shown(row[key]) for key in ("measure", "change", "mode")),
                *(length_of(row), f"{row['idle_s']:g}", str(row["at_once"])),
                *(number(row[key]) for key in ("base_p50_ms", "p50_ms", "difference_ms")),
                "-" if quartiles is None else f"{quartiles[0]:+.1f} … {quartiles[1]:+.1f}",
                number(row["net_difference_ms"]),
                number(row["ratio"], 2),
                *(number(row[key], 0) for key in ("base_wire_bytes", "wire_bytes")),
                {True: "yes", False: "no", None: "-"}[row["same_text"]],
                shown(row["error"]) if row["requests"] == 0 else str(row["failures"]),
            ]
        )
    words = (
        "<p>One thing changed at a time, on the first profile, in turns with the same requests without the change. "
        "The comparison called (noise) changes nothing: differences of its size mean nothing. Less compute: the "
        "difference of latencies without the arithmetic that was booked, which varies on a busy machine.</p>"
    )
    picture = (
        [
            _figure(
                ablation_picture(rows),
                "Bars and figures: latency, slower with the change to the right. Diamonds: without arithmetic.",
            )
        ]
        if any(row["ratio"] is not None for row in rows)
        else []
    )
    return ["<h2>What each measure is worth</h2>", words, *picture, html_table(head, body, text_columns=4)]


def _links(record: dict[str, Any]) -> list[str]:
    head = ["link", "profile", "nominal ms", "p50 ms", "least ms", "most ms", "over nominal ms"]
    body = [
        [
            f"{shown(link['source'])} - {shown(link['destination'])}",
            shown(link["profile"]),
            *(f"{link[key]:.2f}" for key in ("nominal_ms", "p50_ms", "least_ms", "most_ms")),
            f"{link['p50_ms'] - link['nominal_ms']:.2f}",
        ]
        for link in record["links"]
    ]
    parts = [
        "<h2>What the lab itself costs</h2>",
        "<p>Round trips of 64 bytes on plain sockets, against what the profile promises.</p>",
        html_table(head, body, text_columns=2),
    ]
    if record["control"]:
        parts += ["<p>The same requests, in turns, in the lab's fastest network and on plain loopback.</p>"]
        parts += [_table(record["control"])]
    return parts


def _figure(svg: str, caption: str) -> str:
    labelled = svg.replace("<svg", f'<svg role="img" aria-label="{shown(caption)}"', 1)
    return f"<figure>{labelled}<figcaption>{shown(caption)}</figcaption></figure>"
