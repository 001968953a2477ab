"""Coverage-guided fuzzing of one parser, with atheris: `pip install atheris`, then
`python .ci/fuzz TARGET --seconds 600 --corpus DIR`.

A target gets bytes, calls the real parser, and lets only the errors pass that the parser documents. A finding is any
other exception, over 2.5 GB of memory, or an input that takes over 20 s. Findings go to DIR-findings, one a cause; what
reaches new code stays in DIR, which is begun with messages that the code itself makes. Not a part of CI.
"""

import argparse
import contextlib
import hashlib
import importlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OWN = tuple(f"{ROOT / package}/" for package in ("onesweep", "stages", "serving", "trainer", ".ci"))
# A target is a function of its name in one of the modules beside this one.
TARGETS = {
    **dict.fromkeys(("hop", "request", "http"), "serving_targets"),
    **dict.fromkeys(("manifest", "weights", "topology", "files", "config"), "file_targets"),
    **dict.fromkeys(("gguf", "folder", "tokenizer"), "file_targets"),
    **dict.fromkeys(("update", "rounds"), "training_targets"),
}
RSS_MB, SLOW_S, MAX_BYTES = 2560, 20, 1 << 17
MEMORY = Path("/dev/shm")  # where inputs that are read from files lie
STARTS = 20  # of one call: libFuzzer ends with an input that is too slow or too large


def fuzz(name: str, seconds: int, corpus: Path, findings: Path) -> None:
    """Run libFuzzer on one target, in this process. Does not return."""
    import atheris

    # Only modules that are imported here count for coverage: those of the targets, and all that they import.
    with atheris.instrument_imports(include=["onesweep", "gguf", "tomllib"]):
        target = getattr(importlib.import_module(TARGETS[name]), name)()
    if not any(corpus.iterdir()):
        for seed in target.seeds:
            (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    seen: set[str] = set()

    def one(data: bytes) -> None:
        begin = time.thread_time()
        try:
            target.take(data)
        except Exception as error:
            where = [each for each in traceback.extract_tb(error.__traceback__) if each.filename.startswith(OWN)][-1]
            cause = f"{type(error).__name__} at {where.filename.removeprefix(str(ROOT))}:{where.lineno}"
            if cause not in seen:
                seen.add(cause)
                kept = findings / re.sub(r"\W+", "-", cause)
                kept.write_bytes(data)
                print(f"FINDING {cause}: {str(error)[:300]} ({kept})", flush=True)
        if (took := time.thread_time() - begin) > SLOW_S / 4:
            print(f"SLOW: {took:.1f} s for {data[:80]!r}", flush=True)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        with contextlib.suppress(ValueError, RecursionError, OverflowError):
            if target.mutate and rng.random() < 0.5:
                return target.mutated(rng, data)[:most]
        return bytes(atheris.Mutate(data, most))

    flags = {"max_total_time": seconds, "rss_limit_mb": RSS_MB, "timeout": SLOW_S, "max_len": MAX_BYTES}
    flags |= {"print_final_stats": 1, "len_control": 0}
    options = [f"-artifact_prefix={findings}/", *(f"-{flag}={value}" for flag, value in flags.items())]
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=mutate)
    atheris.Fuzz()


def watch(name: str, seconds: int, corpus: Path) -> tuple[int, str]:
    """Run libFuzzer in processes of its own, for it ends at an input that is too slow or too large: start it again, as
    long as there is time. Prints what was found; returns executions and coverage."""
    executions, coverage, until = 0, "", time.monotonic() + seconds
    command = [sys.executable, str(Path(__file__).resolve().parent), name, "--inside", f"--corpus={corpus}"]
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        env = {**os.environ, "RUST_BACKTRACE": "0", "PYTHONPATH": paths, "TMPDIR": folder}
        output: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        for _ in range(STARTS):
            if (left := int(until - time.monotonic())) <= 0:
                break
            with subprocess.Popen([*command, f"--seconds={left}"], env=env, **output) as run:
                for line in run.stdout or ():
                    if found := re.search(r"cov: \d+ ft: \d+ corp: \d+", line):
                        coverage = found[0]
                    elif found := re.search(r"stat::number_of_executed_units: +(\d+)", line):
                        executions += int(found[1])
                    elif re.match(r"FINDING|SLOW|SUMMARY|Traceback|  File|\w*Error", line):
                        print(line, end="", flush=True)
            if run.returncode == 1:  # Python's, not libFuzzer's: the target does not come up
                break
    return executions, coverage


def main() -> int:
    parser = argparse.ArgumentParser("fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--corpus", type=Path, help="default runs/fuzz/TARGET")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    corpus = (options.corpus or ROOT / "runs/fuzz" / options.target).absolute()
    findings = corpus.with_name(f"{corpus.name}-findings")
    for folder in (corpus, findings):
        folder.mkdir(parents=True, exist_ok=True)
    if options.inside:
        fuzz(options.target, options.seconds, corpus, findings)
    executions, coverage = watch(options.target, options.seconds, corpus)
    kept = sorted(findings.iterdir())
    print(f"{options.target}: {executions} executions, {coverage}, {len(kept)} findings in {findings}")
    return 1 if kept or not executions else 0


if __name__ == "__main__":
    sys.exit(main())
