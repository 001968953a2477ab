"""Counts of the source tree, and rules that no linter has. `lint-imports` holds the layers.

`python .ci/house.py` prints the counts beside their limits, then every broken rule, and exits with 1 if there is one.
The limits may only fall: a feature pays for its lines with others'. Generated stubs (`*_pb2*`) are left out everywhere.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

# without types
_constants: Any = import_module("re._constants")
_parser: Any = import_module("re._parser")

PACKAGES = ("onesweep", "stages", "serving", "trainer", "loadtest")
NAMELESS = {"utils.py", "helpers.py"}
TOP_FOLDERS = {"deploy", "docs", "proto", "tests", "weights", *PACKAGES}

MATCHERS = {f"re.{name}" for name in ("compile", "match", "fullmatch", "search", "sub", "split", "findall", "finditer")}
# Logic that is told events and the time: it runs in tests and in virtual time as it does over a network.
LOGIC = {
    *("serving.router.accounting", "serving.router.admission", "serving.router.answer", "serving.router.journal"),
    *("serving.router.paths", "serving.router.placement", "serving.router.request", "serving.router.rollout_state"),
    "serving.router.session",
    *("stages.host.admission", "stages.host.grammar", "stages.host.prefixes", "stages.host.sessions"),
    "stages.host.validation",
    *("trainer.rounds.ledger", "trainer.rounds.members", "trainer.rounds.merging", "trainer.rounds.schedule"),
    "trainer.rounds.spec",
}
OUTSIDE = {"asyncio", "grpc", "socket", "ssl", "subprocess", "threading", "time", "stages.clock", "stages.threads"}
BANNED_OPENINGS = re.compile(r"(What|Who|Whoever|Whether|Those|Of|How|Where)\b")
BANNED_PHRASES = re.compile(r"\b(whoever|what came of|goes on|is told)\b", re.IGNORECASE)


def parsed(source: str) -> ast.Module:
    """The syntax tree of a file."""
    # garbage of other tests, if it were collected meanwhile, may log a traceback: that breaks Python 3.11's parser
    # (gh-106905)
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    path: Path

    @cached_property
    def source(self) -> str:
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        return parsed(self.source)

    @property
    def lines(self) -> int:
        return self.source.count("\n")

    def comments(self) -> int:
        """Comment lines that a person wrote for people."""
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        return sum(t.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:)", t.string) for t in tokens)


def find_modules(root: Path) -> Iterator[Module]:
    """Every module of the packages."""
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if "_pb2" not in path.name:
                yield Module(".".join(path.relative_to(root).with_suffix("").parts), path)


def nameless_files(root: Path) -> list[str]:
    paths = (path for package in (*PACKAGES, "tests") for path in (root / package).rglob("*.py"))
    return [f"{path.relative_to(root)}: name it after what it holds" for path in paths if path.name in NAMELESS]


def stray_folders(root: Path) -> list[str]:
    """Top-level folders in git that the house has no room for."""
    listing = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=False)
    folders = {Path(file).parts[0] for file in listing.stdout.splitlines() if len(Path(file).parts) > 1}
    return [f"{folder}/: no such room at the top level" for folder in sorted(folders - TOP_FOLDERS) if folder[0] != "."]


def silent_tests(root: Path) -> list[str]:
    """Test files without an assert and without pytest.raises."""

    def asserts(node: ast.AST) -> bool:
        return isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr == "raises")

    return [
        f"{path.relative_to(root)} asserts nothing"
        for path in sorted((root / "tests").rglob("test_*.py"))
        if not any(asserts(node) for node in ast.walk(parsed(path.read_text())))
    ]


def mannered_prose(root: Path) -> list[str]:
    """Docstrings without a main clause, and phrases that a native engineer would not write."""
    broken = []
    for module in find_modules(root):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if BANNED_OPENINGS.match(text):
                    line = getattr(node, "lineno", 1)
                    broken.append(f"{module.path.relative_to(root)}:{line}: docstring begins '{text[:40]}'")
    for path in [*(module.path for module in find_modules(root)), *sorted((root / "docs").glob("*.md"))]:
        for number, text in enumerate(path.read_text().splitlines(), 1):
            if BANNED_PHRASES.search(text):
                broken.append(f"{path.relative_to(root)}:{number}: {text.strip()[:80]}")
    return broken


def logic_with_io(root: Path) -> list[str]:
    """Modules of LOGIC that reach for the network, a thread or a clock themselves."""
    modules = {module.name: module for module in find_modules(root)}
    found = [f"{name}: LOGIC names it, but it does not exist" for name in sorted(LOGIC - modules.keys())]
    for name in sorted(LOGIC & modules.keys()):
        for node in ast.walk(modules[name].tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            reached = [each for each in names if each in OUTSIDE or each.partition(".")[0] in OUTSIDE]
            found += [f"{name} is logic, but imports {each}: pass in what it needs" for each in reached]
    return found


def slow_patterns(root: Path) -> list[str]:
    """Regular expressions that may take more than linear time: a repeat of unbounded length in another one, unless a
    character that it cannot match stands before it each time."""
    broken = []
    for module in find_modules(root):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in MATCHERS and node.args:
                pattern = _literal(node.args[0])
                if pattern is not None and _repeats_in_repeat(_parser.parse(pattern)):
                    where = f"{module.path.relative_to(root)}:{node.lineno}"
                    broken.append(f"{where}: {pattern!r} may be slow on some texts")
    return broken


def _literal(node: ast.expr) -> str | bytes | None:
    """A pattern as it is written, with a letter for each value that is put in; None for one that is made elsewhere."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "1" for part in node.values)
    return None


def _repeats_in_repeat(items: Any, around: Any = None) -> bool:  # noqa: ANN401 - parts of a parsed pattern
    """:param around: what the unbounded repeat around these items begins with."""
    for op, value in items:
        body = around
        if op in (_constants.MAX_REPEAT, _constants.MIN_REPEAT) and value[1] is _constants.MAXREPEAT:
            if around is not None and not _is_apart(around, value[2]):
                return True
            body = value[2][0]
        if any(_repeats_in_repeat(part, body) for part in _parts_of(value)):
            return True
    return False


def _parts_of(value: Any) -> Iterator[Any]:  # noqa: ANN401
    """The patterns within an item."""
    if isinstance(value, _parser.SubPattern):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _parts_of(each)


def _is_apart(first: Any, repeated: Any) -> bool:  # noqa: ANN401
    """True if `first` is a character that `repeated` never matches."""
    if first[0] is _constants.SUBPATTERN:
        first = first[1][3][0]
    if first[0] is not _constants.LITERAL or len(repeated) != 1 or repeated[0][0] is not _constants.IN:
        return False
    return not any(_holds(item, first[1]) for item in repeated[0][1])


def _holds(item: Any, char: int) -> bool:  # noqa: ANN401
    op, value = item
    if op is _constants.LITERAL:
        return bool(value == char)
    if op is _constants.RANGE:
        return bool(value[0] <= char <= value[1])
    return op is not _constants.CATEGORY or value is not _constants.CATEGORY_WORD or chr(char).isalnum()


RULES: Sequence[Callable[[Path], list[str]]] = (
    *(nameless_files, stray_folders, silent_tests, mannered_prose, logic_with_io, slow_patterns),
)


@dataclass(frozen=True)
class Count:
    """One counted row and the most (or least) that it may be."""

    name: str
    value: float
    limit: float | None = None
    at_least: bool = False

    @property
    def kept(self) -> bool:
        if self.limit is None:
            return True
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self) -> str:
        shown = f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:,.4g}"
        sign = "at least" if self.at_least else "at most"
        limit = f"  ({sign} {self.limit:,g}{'' if self.kept else ': BROKEN'})" if self.limit is not None else ""
        return f"{self.name:<46} {shown:>9}{limit}"


def counts(root: Path) -> list[Count]:
    """The rows of the house, counted now."""
    modules = list(find_modules(root))
    nodes = [node for module in modules for node in ast.walk(module.tree)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = sum(module.lines for module in modules)
    files = [module.lines for module in modules if module.lines]
    tests = list((root / "tests").rglob("*.py"))
    return [
        Count("source lines", lines, 49_499),
        Count("source files that are not empty", len(files), 255),
        Count("lines of a file, median", statistics.median(files)),
        Count("lines of a file, largest", max(files), 400),
        Count("lines of a function, median", statistics.median((n.end_lineno or 0) - n.lineno + 1 for n in functions)),
        Count("class names that occur twice", sum(n > 1 for n in classes.values()), 0),
        Count("comments per 100 lines", 100 * sum(m.comments() for m in modules) / lines, 4, at_least=True),
        Count("test lines", sum(path.read_text().count("\n") for path in tests), 34_634),
    ]


def main() -> int:
    root = Path(__file__).resolve().parents[1]
    rows = counts(root)
    print("\n".join(str(row) for row in rows))
    broken = [line for rule in RULES for line in rule(root)]
    print("\n".join(broken))
    return 1 if broken or not all(row.kept for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
