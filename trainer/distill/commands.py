"""`onesweep distill`: a drafter from a pipeline's own outputs."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.command_options import add_device_option, positive

# What needs torch is imported when the command runs.


def register_distill(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser of `onesweep`."""
    parser = subparsers.add_parser("distill", help="make a small drafter from an AR pipeline's own outputs")
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="the pipeline to learn from")
    parser.add_argument(
        "--text", type=Path, nargs="+", action="extend", required=True, metavar="FILE", help="UTF-8 text, or folders"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: local/ in the checkpoint")
    parser.add_argument(
        "--layers", type=layer_list, metavar="N[-M][,N[-M]]", help="default: as many as a stage's size allows"
    )
    parser.add_argument("--minutes", type=positive, help="how long to train, resumed runs counted together")
    parser.add_argument("--steps", type=int, help="or for how many steps")
    parser.add_argument("--sequences", type=int, help="windows in a step (8)")
    parser.add_argument("--window", type=int, metavar="N", help="symbols in a window (256)")
    parser.add_argument("--written", type=float, metavar="SHARE", help="of samples that the model writes itself (0.1)")
    parser.add_argument("--passes", type=float, metavar="N", help="how often a sample is read on average (3)")
    parser.add_argument("--learning-rate", type=float, metavar="RATE", help="peak rate of the layers (1.5e-3)")
    parser.add_argument("--lens-rate", type=float, metavar="RATE", help="peak rate of the matrix under the head (1e-3)")
    parser.add_argument("--float32", action="store_true", help="compute in float32, where bfloat16 is slow")
    add_device_option(parser)
    parser.add_argument("--threads", type=int, metavar="N", help="default: all cores")
    parser.add_argument("--seed", type=int, help="of samples and batches (0)")
    parser.set_defaults(run=run_distill)


def run_distill(options: argparse.Namespace) -> int:
    """Distil, or go on."""
    from trainer.command_options import given
    from trainer.distill.distilling import distill
    from trainer.distill.settings import DistillSettings
    from trainer.threads import set_threads

    set_threads(options.threads)
    names = "layers steps minutes sequences window written passes learning_rate lens_rate device seed"
    chosen = given({name: getattr(options, name) for name in names.split()})
    settings = DistillSettings(
        options.checkpoint,
        tuple(options.text),
        options.out or options.checkpoint / "local",
        bfloat16=not options.float32,
        **chosen,
    )
    manifest = distill(settings, lambda line: print(line, flush=True))
    found = manifest.metrics["distilled"]
    print(
        f"{settings.out}: {found['symbols']} symbols in {found['minutes']} minutes; on text of the model's own "
        f"KL {found['written_kl_bits']:.3f} bits, TV {found['written_total_variation']:.3f}; "
        f"{found['draft_ms']} ms a guess"
    )
    return 0


def layer_list(text: str) -> tuple[int, ...]:
    """Numbers, or N-M with both ends, with commas between."""
    ends = (part.partition("-") for part in text.split(","))
    return tuple(index for first, _, last in ends for index in range(int(first), int(last or first) + 1))
