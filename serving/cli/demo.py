"""`onesweep demo`: one prompt in every mode over three hosts here, and a picture; of a pretrained model, an answer."""

import argparse
import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from onesweep.serving.cli.deployment import SHIPPED, Deployment, temporary_deployment
from onesweep.serving.cli.ports import free_port_block
from onesweep.serving.cli.run import HOSTS, add_import_options, find_checkpoint, manifest_record
from onesweep.serving.client.client import Client, DrawnPictures, Result, TextDecoder
from onesweep.serving.client.comparison import AUTO, TEXT_WIDTH, all_entrants, run_entrants
from onesweep.serving.router.request import MAX_TIMEOUT_S
from onesweep.serving.router.topology import local_topology
from onesweep.stages.errors import printable
from onesweep.stages.progress import ProgressLine
from onesweep.stages.signals import ends_cleanly

PROMPT = "The best thing about the movie is that"
QUESTION = """\
Summarise in one sentence: The letter left the coast before dawn, and it was noon when the rider saw the first roofs \
of the town. He had not slept. At the gate a boy asked him what he carried, and he said that he did not know."""
# At a low temperature a small model keeps to words that it knows.
BYTES, TOKENS, TEMPERATURE, SEED = 128, 96, 0.3, 1
PICTURES, PICTURE = "pictures", "ankle boot"
# from black to white, as a dark terminal shows them
SHADES = " .:-=+*#%@"
EXACT, SAME = "ar", "ar-speculative"
FOLDERS = ("chain", "scorer", "ar", "local")
WORTH: Mapping[str, str] = {
    "sweep": "letter soup: a noise chain writes all of it in one trip",
    "chunked": "letter soup: the same chain, a trip for every chunk",
    "resample:scorer": "words: 16 drafts of `local`, scored in one trip by hosts that run `scorer`",
    "resample:ar": "words: 16 drafts of `local`, scored in one trip by hosts that run `ar`",
    EXACT: "exact: the model's own text, a trip for every token",
    "local": "words: the router's small model, which asks no host",
}


def add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument(
        "model", type=Path, nargs="?", default=SHIPPED, metavar="MODEL", help="as of `run` (the shipped weights)"
    )
    demo.add_argument("--prompt", metavar="TEXT", help="text to continue, or a question for a pretrained model")
    add_import_options(demo)


def run_demo(options: argparse.Namespace) -> int:
    progress = ProgressLine()
    with ends_cleanly():
        try:
            checkpoint, parts = find_checkpoint(options, HOSTS, progress)
            hosts = min(HOSTS, parts)
            topology = local_topology(hosts, parts, checkpoint, free_port_block(hosts + 1) + 1)
            print(f"starting {hosts} hosts and a router on this machine ...", flush=True)
            with (
                temporary_deployment(topology, checkpoint, waiting=lambda why: progress.at("loading")) as deployment,
                Client(deployment.topology.router) as client,
            ):
                progress.close()
                is_pretrained = "family" in manifest_record(checkpoint).get("architecture", {})
                prompt = options.prompt or (QUESTION if is_pretrained else PROMPT)
                kept = (show_model if is_pretrained else show_modes)(client, deployment, checkpoint, prompt)
            if checkpoint == SHIPPED:
                show_drawing(SHIPPED / PICTURES)
        finally:
            progress.close()
    print("\nstopped. `onesweep run MODEL` talks with a model of your own, `onesweep up --detach` keeps hosts running.")
    return 0 if kept else 1


def show_modes(client: Client, deployment: Deployment, checkpoint: Path, prompt: str) -> bool:
    """Run one prompt in every mode of small models. False where a promise is broken."""
    sizes = [f"{folder} {size / 1e6:.1f}" for folder in FOLDERS if (size := _parameters(checkpoint / folder))]
    tiny = (
        f"The weights are tiny: {', '.join(sizes)} million parameters. Their text shows what each way of writing costs"
    )
    print("\n".join(textwrap.wrap(f"{tiny} and keeps, not what a good model writes.", TEXT_WIDTH)) + "\n")
    settings: dict[str, Any] = {"max_bytes": BYTES, "seed": SEED, "temperature": TEMPERATURE}
    outcomes = run_entrants(client, prompt, all_entrants(client.status().modes, None), settings)
    exact, same = outcomes.get(EXACT), outcomes.get(SAME)
    kept = not (isinstance(exact, Result) and isinstance(same, Result)) or exact.output == same.output
    worth = {**WORTH, SAME: _promise(kept), AUTO: "what `generate` takes by default"}
    rows: list[tuple[str, ...]] = [("mode", "trips", "seconds", "wire bytes", "what its text is worth")]
    rows += [_costs(label, outcome, worth.get(label, "")) for label, outcome in outcomes.items()]
    print(_table(rows))
    for label, outcome in outcomes.items():
        if not isinstance(outcome, Result) or (label == SAME and kept):
            continue
        title = f"{EXACT} = {SAME}" if label == EXACT and kept and same else label
        print(f"\n{title}:\n{_wrapped(f'{printable(prompt)}|{printable(outcome.text)}')}")
        if outcome.reason:
            print(f"  why:\n{_wrapped(outcome.reason)}")
    return kept


def show_model(client: Client, deployment: Deployment, checkpoint: Path, prompt: str) -> bool:
    """Have a pretrained model answer in `ar` and `ar-speculative`. False where their texts differ."""
    processes = [(host.name, psutil.Process(deployment.processes[host.name])) for host in deployment.topology.hosts]
    memory = [f"{name} {process.memory_info().rss / 1e6:.0f}" for name, process in processes]
    print(f"{_parameters(checkpoint) / 1e6:.0f} million numbers in all; MB of memory: {', '.join(memory)}\n")
    asked: dict[str, Any] = {"messages": [("user", prompt)]} if client.status().chat else {"prompt": prompt}
    asked |= {"max_tokens": TOKENS, "temperature": 0, "seed": SEED, "timeout_s": MAX_TIMEOUT_S}
    print(_wrapped(printable(prompt)) + "\n")
    decoder, results = TextDecoder(), dict[str, Result]()
    for item in client.stream(**{"prompt": b"", **asked}, mode=SAME):
        if isinstance(item, Result):
            results[SAME] = item
        else:
            print(printable(decoder.feed(item), newline="\n"), end="", flush=True)
    print(printable(decoder.end(), newline="\n") + "\n", flush=True)
    results[EXACT] = client.generate(**{"prompt": b"", **asked}, mode=EXACT)
    kept = results[EXACT].output == results[SAME].output
    rows: list[tuple[str, ...]] = [
        ("mode", "trips", "tokens", "seconds", "tokens/s", "wire bytes", "bytes/token", "its text")
    ]
    for mode, why in ((EXACT, "exact: what the model writes in one process"), (SAME, _promise(kept))):
        result = results[mode]
        tokens, seconds = max(result.output_tokens, 1), result.latency_ms / 1000
        figures = (result.sweeps, result.output_tokens, f"{seconds:.1f}", f"{tokens / max(seconds, 1e-3):.1f}")
        wire = result.wire_bytes_total
        rows.append((mode, *map(str, figures), f"{wire:,}", f"{wire / tokens:,.0f}", why))
    print(_table(rows))
    return kept


def show_drawing(bundle: Path) -> None:
    """Draw a picture along three hosts, and show how it clears from host to host."""
    topology = local_topology(HOSTS, HOSTS, bundle, free_port_block(HOSTS + 1) + 1)
    with temporary_deployment(topology, bundle) as deployment, Client(deployment.topology.router) as client:
        shown: list[DrawnPictures] = []
        drawn = client.draw(PICTURE, seed=SEED, preview=shown.append)
    stages = [*sorted(shown, key=lambda each: each.block or 0), drawn]
    print(f"\n`{PICTURE}`, drawn in one trip from noise, as it clears from host to host:\n")
    columns = [_characters(stage) for stage in stages]
    print("\n".join("   ".join(row).rstrip() for row in zip(*columns, strict=True)))
    seconds, size = drawn.latency_ms / 1000, max(drawn.wire_bytes)
    print(f"\n{drawn.sweeps} trip, {drawn.levels} steps, {seconds:.2f} s, at most {size:,} bytes a hop")


# Characters and not an image protocol: every terminal shows them, and so does a log of CI.
def _characters(drawn: DrawnPictures) -> list[str]:
    """The first picture in characters, one for two rows of pixels."""
    grey = drawn.pixels[0].mean(axis=0)
    pairs = grey[: len(grey) // 2 * 2].reshape(-1, 2, grey.shape[1]).mean(axis=1)
    return ["".join(SHADES[int(value * (len(SHADES) - 1) / 255 + 0.5)] for value in row) for row in pairs]


def _promise(kept: bool) -> str:
    return f"equal to `{EXACT}` by promise: {'checked' if kept else 'BROKEN, please report it'}"


def _costs(label: str, outcome: Result | str, worth: str) -> tuple[str, ...]:
    if isinstance(outcome, str):
        return (label, "-", "-", "-", outcome)
    title = f"{AUTO}: {outcome.mode}" if label == AUTO else label
    return (title, str(outcome.sweeps), f"{outcome.latency_ms / 1000:.2f}", f"{outcome.wire_bytes_total:,}", worth)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], tuple("-" * width for width in widths), *rows[1:]]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _wrapped(text: str) -> str:
    return textwrap.indent("\n".join(textwrap.wrap(text, TEXT_WIDTH, drop_whitespace=False)), "  ")


def _parameters(directory: Path) -> int:
    """Numbers in the files of a checkpoint, by their headers: a file may hold two bytes of each, or four."""
    count = 0
    for path in directory.rglob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        count += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return count
