"""Draws places of the source at random, changes one at a time, and prints which changes no test notices.

`python .ci/mutants.py --count 60` draws 60 places (`--seed`, `--weights stages=3,serving=3`), tries each in a copy of
the tree with the tests that import its module, then with those of its folder and of WIDER, and keeps what it found in
`--out`; the same call goes on where it was stopped. `--show` prints the places and runs nothing. Not a part of CI: a
place takes a minute or more.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("stages", "serving", "trainer", "loadtest")
# Tests that use a folder without an import of it, or through servers; a module's own folder of tests comes first.
WIDER = {
    "stages/wire": ("tests/serving/test_tls.py", "tests/serving/test_tokens.py", "tests/serving/router/test_faults.py"),
    "stages/host": ("tests/stages/wire", "tests/serving/router/test_session.py", "tests/serving/router/test_faults.py"),
    "stages/model": ("tests/stages/backends", "tests/serving/modes", "tests/trainer/blocks"),
    "stages/backends": ("tests/stages/host/test_host.py", "tests/stages/pictures"),
    "stages/pictures": ("tests/serving/drawing",),
    "stages/checkpoint": ("tests/serving/router/test_deploy.py", "tests/serving/router/test_release_push.py"),
    "stages/telemetry": ("tests/serving/router/test_records.py",),
    "serving/router": ("tests/serving/modes/test_speculative.py", "tests/serving/test_tokens.py"),
    "serving/modes": ("tests/serving/router/test_validation.py", "tests/serving/cli/test_commands.py"),
    "serving/drawing": ("tests/serving/gateway/test_picture_race.py",),
    "serving/client": ("tests/serving/cli/test_chat.py",),
    "serving/gateway": ("tests/serving/drawing/test_drawing.py",),
    "serving/cli": ("tests/e2e/test_wheel.py",),
    "trainer/rounds": ("tests/trainer/rounds/network", "tests/trainer/test_commands.py"),
    "trainer/blocks": ("tests/trainer/test_commands.py",),
}
COMPARISONS = {
    "Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">", "Eq": "!=", "NotEq": "==",
    "In": "not in", "NotIn": "in", "Is": "is not", "IsNot": "is",
}  # fmt: skip
OPERATORS = {"Add": "-", "Sub": "+", "Mult": "/", "Div": "*", "FloorDiv": "*", "Mod": "*"}
# A change here alters what is shown or how long something waits, and no outcome.
COSMETIC_CALLS = (
    "debug",
    "info",
    "warning",
    "exception",
    "print",
    "log",
    "say",
    "tell",
    "annotate",
    "progress",
    "sleep",
)
COSMETIC_NAMES = ("_s", "_ms", "timeout", "width", "digits", "metavar", "help", "size_in", "fontsize", "name", "thread")
COSMETIC_FUNCTIONS = ("__repr__", "__str__", "describe", "lines_of", "_draw", "_panel", "_legend", "help_of", "page")
LARGE = 64  # one more or less of a larger number is a limit a little elsewhere
FAILED, INTERRUPTED, UNUSABLE = 1, 2, 4  # the last where a conftest.py cannot be imported


@dataclass(frozen=True)
class Place:
    """One change: bytes `start` to `end` of a file become `after`."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    @property
    def label(self) -> str:
        return f"{self.path}:{self.line} {self.kind}: {self.before.strip()[:60]!r} -> {self.after.strip()[:60]!r}"


class Finder(ast.NodeVisitor):
    """Collects the places of one file."""

    def __init__(self, path: str, source: bytes) -> None:
        self.path, self.source, self.places = path, source, list[Place]()
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def put(self, node: ast.AST, kind: str, after: str) -> None:
        start, end = self.span(node)
        self.places.append(Place(self.path, node.lineno, kind, start, end, self.text(node), after))  # type: ignore[attr-defined]

    def between(self, left: ast.AST, right: ast.AST, kind: str, old: str, new: str) -> None:
        """Change the operator between two expressions."""
        start, end = self.span(left)[1], self.span(right)[0]
        words = self.source[start:end].decode()
        if words.count(old) == 1:
            after = words.replace(old, new)
            self.places.append(Place(self.path, left.lineno, kind, start, end, words, after))  # type: ignore[attr-defined]

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name not in COSMETIC_FUNCTIONS and not node.name.startswith("add_"):
            for child in node.body:
                self.visit(child)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            return
        last = node.body[-1]
        if not node.orelse and isinstance(last, ast.Raise | ast.Return | ast.Continue):
            self.put(node.test, "dropped guard", f"False and ({self.text(node.test)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        name = type(node.ops[0]).__name__
        if len(node.ops) == 1 and name in COMPARISONS:
            old = ast.unparse(ast.Compare(ast.Name("a"), node.ops, [ast.Name("b")]))[2:-2]
            self.between(node.left, node.comparators[0], "comparison", old, COMPARISONS[name])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
        self.between(node.values[0], node.values[1], "boolean operator", old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        name = type(node.op).__name__
        words = isinstance(node.left, ast.JoinedStr | ast.Constant | ast.List | ast.Tuple) and name == "Add"
        if name in OPERATORS and not words:
            old = ast.unparse(ast.BinOp(ast.Name("a"), node.op, ast.Name("b")))[2:-2]
            self.between(node.left, node.right, "sign", old, OPERATORS[name])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub) and not isinstance(node.operand, ast.Constant):
            self.put(node, "sign", f"({self.text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int and 0 <= node.value <= LARGE:
            self.put(node, "constant", str(node.value + 1))

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in COSMETIC_CALLS or name.startswith("_log"):
                return
            self.put(node, "dropped call", "pass")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = self.text(node.func)
        if called.split(".")[-1] in (*COSMETIC_CALLS, "isinstance", "cast", "max", "min", "zip"):
            return
        names = [a for a in node.args if isinstance(a, ast.Name | ast.Attribute)]
        if len(node.args) >= 2 and node.args[:2] == names[:2]:
            first, second = node.args[:2]
            start, end = self.span(first)[0], self.span(second)[1]
            between = self.source[self.span(first)[1] : self.span(second)[0]].decode()
            after = self.text(second) + between + self.text(first)
            before = self.source[start:end].decode()
            self.places.append(Place(self.path, node.lineno, "swapped arguments", start, end, before, after))
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if not (node.arg or "").endswith(COSMETIC_NAMES):
            self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if not (isinstance(target, ast.Name) and target.id.lower().endswith(COSMETIC_NAMES)):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not self.text(node.target).lower().endswith(COSMETIC_NAMES):
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words are not looked into."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Nor errors: the guard before one counts."""


def places_of(package: str) -> dict[str, list[Place]]:
    """All places of a package, by kind."""
    found: dict[str, list[Place]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        if "_pb2" not in path.name:
            source = path.read_bytes()
            finder = Finder(path.relative_to(ROOT).as_posix(), source)
            finder.visit(ast.parse(source))
            for place in finder.places:
                found.setdefault(place.kind, []).append(place)
    return found


def draw(count: int, seed: int, weights: dict[str, float]) -> list[Place]:
    """Places without repetition: a package by its weight, then a kind, then a place."""
    rng, known = random.Random(seed), {package: places_of(package) for package in weights}
    drawn: dict[Place, None] = {}
    while len(drawn) < count:
        (package,) = rng.choices(list(weights), list(weights.values()))
        drawn[rng.choice(known[package][rng.choice(sorted(known[package]))])] = None
    return list(drawn)


def tests_of(path: str) -> tuple[list[str], list[str]]:
    """Files of tests that import a module, the shortest first; and the wider set, files and folders."""
    module = "onesweep." + path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    package, _, name = module.rpartition(".")
    own = [
        test
        for test in (ROOT / "tests").rglob("test_*.py")
        if f"from {module} import" in (words := test.read_text()) or f"from {package} import {name}" in words
    ]
    folder = path.rpartition("/")[0]
    wider = [folder_of for folder_of in (f"tests/{folder}", *WIDER.get(folder, ())) if (ROOT / folder_of).exists()]
    return [t.relative_to(ROOT).as_posix() for t in sorted(own, key=lambda t: t.stat().st_size)], wider


def copy_tree(target: Path) -> None:
    """All files that git knows or does not ignore."""
    listing = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0"):
        source = ROOT / name
        if name and (source.is_symlink() or source.is_file()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name, follow_symlinks=False)


def run_tests(tree: Path, tests: list[str], limit_s: float) -> tuple[str, str]:
    """ "failed" with the first test that does, "passed", or "timed out"."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "240", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tree, env=environment, **streams) as run:
        try:
            said, _ = run.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            run.kill()
            return "timed out", ""
    if run.returncode not in (FAILED, INTERRUPTED, UNUSABLE):
        return "passed", ""
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)  # a name may have blanks
    return "failed", failed[0] if failed else said[-300:]


def try_place(tree: Path, place: Place, limit_s: float) -> dict[str, object]:
    """Verdict on one place."""
    target, begun = tree / place.path, time.monotonic()
    source = target.read_bytes()
    own, wider = tests_of(place.path)
    verdict, by = "LIVED", ""
    try:
        target.write_bytes(source[: place.start] + place.after.encode() + source[place.end :])
        for tests in (own, wider):
            outcome, by = run_tests(tree, tests, limit_s) if tests else ("passed", "")
            if outcome != "passed":
                verdict = "killed" if outcome == "failed" else outcome
                break
    finally:
        target.write_bytes(source)
    # A test that fails on the unchanged tree, too, says nothing.
    if verdict == "killed" and "::" in by and run_tests(tree, [by], limit_s)[0] != "passed":
        verdict = "unclear"
    return {**asdict(place), "verdict": verdict, "by": by, "seconds": round(time.monotonic() - begun)}


def results(path: Path) -> Iterator[dict[str, object]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", default="stages=3,serving=3,trainer=2,loadtest=1")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/mutants.jsonl")
    parser.add_argument("--limit-s", type=float, default=900.0, help="longest run of tests")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no place after that")
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    weights = {name: float(share) for name, _, share in (each.partition("=") for each in options.weights.split(","))}
    drawn = draw(options.count, options.seed, weights)
    if options.show:
        print("\n".join(place.label for place in drawn))
        return 0
    done = {(r["path"], r["start"], r["after"]): r for r in results(options.out)}
    until = time.monotonic() + 60 * options.minutes
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="onesweep-mutants-") as folder:
        copy_tree(Path(folder))
        for place in drawn:
            key = (place.path, place.start, place.after)
            if key not in done and time.monotonic() < until:
                done[key] = try_place(Path(folder), place, options.limit_s)
                with options.out.open("a") as out:
                    out.write(json.dumps(done[key]) + "\n")
                print(f"{done[key]['verdict']:9} {place.label} {done[key]['by']}", flush=True)
    tried = [done[key] for place in drawn if (key := (place.path, place.start, place.after)) in done]
    lived = [r for r in tried if r["verdict"] == "LIVED"]
    # A test that comes to no end may be the change's work, or the machine's.
    counts = Counter(str(r["verdict"]) for r in tried)
    print(f"{len(tried)} of {len(drawn)} tried: {', '.join(f'{n} {verdict}' for verdict, n in counts.items())}")
    for r in lived:
        print(f"  {r['path']}:{r['line']} {r['kind']}: {r['before']!r} -> {r['after']!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
