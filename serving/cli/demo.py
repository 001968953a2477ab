"""`onesweep demo`: one prompt in every mode over three local hosts, and a picture; or a pretrained model's answer."""

import argparse
import textwrap
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from serving.cli.deployment import temporary_deployment
from serving.cli.models import HOSTS, add_import_options, find_checkpoint
from serving.cli.ports import free_port_block
from serving.client.client import Client, DrawnPictures, Result
from serving.client.variants import TEXT_WIDTH, ModeVariant, all_variants, comparison, run_variants
from serving.router.request import MAX_TIMEOUT_S
from serving.router.topology import SHIPPED, local_topology
from stages.model.architecture import LlamaArchitecture
from stages.progress import ProgressLine, ticking
from stages.signals import ends_cleanly

PROMPT = "The best thing about the movie is that"
QUESTION = """\
Summarise in one sentence: The letter left the coast before dawn, and it was noon when the rider saw the first roofs \
of the town. He had not slept. At the gate a boy asked him what he carried, and he said that he did not know."""
# At a low temperature, a small model stays with words that it knows.
BYTES, TOKENS, TEMPERATURE, SEED = 128, 96, 0.3, 1
PICTURES, PICTURE = "pictures", "ankle boot"
# from black to white on a dark terminal
SHADES = " .:-=+*#%@"
EXACT, SAME = "ar", "ar-speculative"
TINY = "The weights are tiny: the texts show what each mode costs and preserves, not what a good model writes."


def add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument(
        "model", type=Path, nargs="?", default=SHIPPED, metavar="MODEL", help="of `run` (shipped weights)"
    )
    demo.add_argument("--prompt", metavar="TEXT", help="text to continue, or a question for a pretrained model")
    add_import_options(demo)


def run_demo(options: argparse.Namespace) -> int:
    progress = ProgressLine()
    with ends_cleanly(), closing(progress), ExitStack() as hosts_run:
        checkpoint, plan = find_checkpoint(options, HOSTS, progress)
        hosts = min(HOSTS, plan.parts)
        topology = local_topology(hosts, plan.parts, checkpoint, free_port_block(hosts + 1) + 1)
        deployment = hosts_run.enter_context(temporary_deployment(topology, checkpoint, progress.at))
        progress.close()
        with hosts_run, Client(deployment.topology.router) as client:
            architectures = [source.manifest.architecture for source in plan.models.values()]
            is_pretrained = isinstance(architectures[0], LlamaArchitecture)
            prompt = options.prompt or (QUESTION if is_pretrained else PROMPT)
            kept = show_modes(client, is_pretrained, prompt)
        if checkpoint == SHIPPED:
            show_drawing(SHIPPED / PICTURES)
    print("\nstopped. `onesweep run MODEL` chats with your own model, `onesweep up --detach` keeps hosts running.")
    return 0 if kept else 1


def show_modes(client: Client, is_pretrained: bool, prompt: str) -> bool:
    """Run one prompt in the served modes. False if `ar-speculative` generates a different text from `ar`."""
    settings: dict[str, Any] = {"seed": SEED, "max_bytes": BYTES, "temperature": TEMPERATURE}
    variants = all_variants(client.status(), None)
    if is_pretrained:
        settings = {"seed": SEED, "max_tokens": TOKENS, "temperature": 0, "timeout_s": MAX_TIMEOUT_S}
        variants = [ModeVariant(EXACT), ModeVariant(SAME)]
        if client.status().chat:
            settings["messages"] = [("user", prompt)]
    else:
        print("\n".join(textwrap.wrap(TINY, TEXT_WIDTH)) + "\n")
    outcomes = run_variants(client, "" if "messages" in settings else prompt, variants, settings)
    print(comparison(prompt, outcomes))
    exact, same = outcomes.get(EXACT), outcomes.get(SAME)
    kept = not (isinstance(exact, Result) and isinstance(same, Result)) or exact.output == same.output
    print(f"\n`{SAME}` writes the text of `{EXACT}`: {'checked' if kept else 'BROKEN, please report it'}")
    return kept


def show_drawing(bundle: Path) -> None:
    """Draw a picture along three hosts, and show how it gets clearer from host to host."""
    topology = local_topology(HOSTS, HOSTS, bundle, free_port_block(HOSTS + 1) + 1)
    with (
        temporary_deployment(topology, bundle) as deployment,
        ticking(f"drawing `{PICTURE}` along three hosts"),
        Client(deployment.topology.router) as client,
    ):
        shown: list[DrawnPictures] = []
        drawn = client.draw(PICTURE, seed=SEED, preview=shown.append)
    stages = [*sorted(shown, key=lambda each: each.block or 0), drawn]
    print(f"\n`{PICTURE}`, drawn in one trip, as the noise clears from host to host:\n")
    columns = [_characters(stage) for stage in stages]
    print("\n".join("   ".join(row).rstrip() for row in zip(*columns, strict=True)))
    seconds, size = drawn.latency_ms / 1000, max(drawn.wire_bytes)
    print(f"\n{drawn.sweeps} trip, {drawn.levels} steps, {seconds:.2f} s, at most {size:,} bytes a hop")


# Characters instead of an image protocol: every terminal shows them, and so does a CI log.
def _characters(drawn: DrawnPictures) -> list[str]:
    """The first picture as characters, each for two rows of pixels."""
    grey = drawn.pixels[0].mean(axis=0)
    pairs = grey[: len(grey) // 2 * 2].reshape(-1, 2, grey.shape[1]).mean(axis=1)
    return ["".join(SHADES[int(value * (len(SHADES) - 1) / 255 + 0.5)] for value in row) for row in pairs]
