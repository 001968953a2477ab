"""Counts of the source tree, and the rules that keep it readable.

`python .ci/house.py` prints the counts beside their limits, then every broken rule, and exits with 1 if there is one.
Generated stubs (`*_pb2*`) are left out everywhere.
"""

from __future__ import annotations

import ast
import graphlib
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

PACKAGES = ("onesweep", "stages", "serving", "trainer", "loadtest")

# A folder may import its own files, those of the folders named here, and all that these may import.
LAYERS: dict[str, tuple[str, ...]] = {
    "stages": (),
    "stages.model": ("stages",),
    "stages.v1": (),
    "stages.telemetry": ("stages.wire",),
    "stages.wire": ("stages.model", "stages.v1"),
    "stages.pictures": ("stages.model",),
    "stages.checkpoint": ("stages.pictures", "stages.wire"),
    "stages.backends": ("stages.checkpoint",),
    "stages.importing": ("stages.backends",),
    "stages.host": ("stages.importing", "stages.telemetry"),
    "serving": ("stages.host",),
    "trainer": ("stages.host",),
    "loadtest": ("serving", "trainer"),
    "onesweep": ("serving", "stages.host"),
}
NO_NETWORK = ("stages.model", "stages.pictures", "stages.backends", "stages.importing")
NETWORK = {"grpc", "asyncio"}
OPTIONAL = {"onnxruntime": "stages.backends"}
NAMELESS = {"utils.py", "helpers.py"}
TOP_FOLDERS = {"deploy", "docs", "loadtest", "onesweep", "proto", "serving", "stages", "tests", "trainer", "weights"}

BANNED_OPENINGS = re.compile(r"(What|Who|Whoever|Whether|Those|Of|How|Where)\b")
BANNED_PHRASES = re.compile(r"\b(whoever|what came of|goes on|is told)\b", re.IGNORECASE)


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
        return ast.parse(self.source)

    @property
    def folder(self) -> str:
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]

    @property
    def lines(self) -> int:
        return self.source.count("\n")

    def comments(self) -> int:
        """Comment lines that a person wrote for people."""
        tokens = tokenize.generate_tokens(io.StringIO(self.source).readline)
        return sum(t.type == tokenize.COMMENT and not re.match(r"#\s*(noqa|type:)", t.string) for t in tokens)


@dataclass(frozen=True)
class Import:
    """One name that a module imports. `late` inside a function, `for_types` under TYPE_CHECKING."""

    target: str
    late: bool
    for_types: bool


def find_modules(root: Path) -> dict[str, Module]:
    """Every module of the packages, by dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            if "_pb2" in path.name:
                continue
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = Module(name, path)
    return found


def _import_nodes(node: ast.AST, late: bool, for_types: bool) -> Iterator[tuple[ast.AST, bool, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, late, for_types
        else:
            inside = late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            types = for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
            yield from _import_nodes(child, inside, types)


@cache
def imports_of(module: Module, known: frozenset[str]) -> tuple[Import, ...]:
    """What a module imports: `from stages import noise` is stages.model.samplers where that is a module."""
    found = []
    for node, late, for_types in _import_nodes(module.tree, False, False):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert isinstance(node, ast.ImportFrom)
            base = "." * node.level + (node.module or "")
            if node.level:
                base = ".".join(
                    [*module.folder.split(".")[: len(module.folder.split(".")) - node.level + 1], base.strip(".")]
                ).strip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in known else base for name in names]
        found += [Import(name, late, for_types) for name in dict.fromkeys(names) if name != module.name]
    return tuple(found)


def layer_of(name: str) -> str:
    """The deepest layer that holds a module."""
    while name and name not in LAYERS:
        name = name.rpartition(".")[0]
    return name


@cache
def layers_below(layer: str) -> frozenset[str]:
    below = {layer}
    for lower in LAYERS[layer]:
        below |= layers_below(lower)
    return frozenset(below)


def upward_imports(root: Path) -> list[str]:
    """Imports that go against the layers."""
    modules = find_modules(root)
    broken = []
    for module in modules.values():
        allowed = layers_below(layer_of(module.name)) if layer_of(module.name) else frozenset()
        for imported in imports_of(module, frozenset(modules)):
            package = imported.target.partition(".")[0]
            if package in PACKAGES and layer_of(imported.target) not in allowed:
                broken.append(f"{module.name} imports {imported.target}")
    return sorted(set(broken))


def network_in_maths(root: Path) -> list[str]:
    """Imports of grpc, asyncio or generated stubs where only mathematics belongs."""
    modules = find_modules(root)
    return [
        f"{module.name} imports {imported.target}"
        for module in modules.values()
        for imported in imports_of(module, frozenset(modules))
        if module.name.startswith(NO_NETWORK)
        and (imported.target.partition(".")[0] in NETWORK or "_pb2" in imported.target or ".v1" in imported.target)
    ]


def optional_imports(root: Path) -> list[str]:
    """Optional libraries imported outside the one folder that wraps them."""
    modules = find_modules(root)
    return [
        f"{module.name} imports {imported.target}"
        for module in modules.values()
        for imported in imports_of(module, frozenset(modules))
        for library, folder in OPTIONAL.items()
        if imported.target.partition(".")[0] == library and not module.name.startswith(folder)
    ]


def import_circle(root: Path) -> list[str]:
    """One circle among the imports that run when a module is loaded, or nothing."""
    modules = find_modules(root)
    graph = {
        name: {i.target for i in imports_of(module, frozenset(modules)) if not i.late and not i.for_types}
        & set(modules)
        for name, module in modules.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return ["a circle of imports: " + " -> ".join(error.args[1])]
    return []


def nameless_files(root: Path) -> list[str]:
    folders = [root / package for package in (*PACKAGES, "tests")]
    return [
        f"{path.relative_to(root)}: name it after what it holds"
        for folder in folders
        for path in folder.rglob("*.py")
        if path.name in NAMELESS
    ]


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
        if not any(asserts(node) for node in ast.walk(ast.parse(path.read_text())))
    ]


def mannered_prose(root: Path) -> list[str]:
    """Docstrings without a main clause, and phrases that a native engineer would not write."""
    broken = []
    for module in find_modules(root).values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                line = getattr(node, "lineno", 1)
                if BANNED_OPENINGS.match(text):
                    broken.append(f"{module.path.relative_to(root)}:{line}: docstring begins '{text[:40]}'")
        for number, text in enumerate(module.source.splitlines(), 1):
            if BANNED_PHRASES.search(text):
                broken.append(f"{module.path.relative_to(root)}:{number}: {text.strip()[:80]}")
    for page in sorted((root / "docs").glob("*.md")):
        for number, text in enumerate(page.read_text().splitlines(), 1):
            if BANNED_PHRASES.search(text):
                broken.append(f"{page.relative_to(root)}:{number}: {text.strip()[:80]}")
    return broken


RULES: tuple[Callable[[Path], list[str]], ...] = (
    upward_imports,
    network_in_maths,
    optional_imports,
    import_circle,
    nameless_files,
    stray_folders,
    silent_tests,
    mannered_prose,
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
        sign = "at least" if self.at_least else "at most"
        limit = f"  ({sign} {self.limit:,g}{'' if self.kept else ': BROKEN'})" if self.limit is not None else ""
        return (
            f"{self.name:<46} {self.value:>9,.4g}{limit}"
            if self.value < 1000
            else f"{self.name:<46} {self.value:>9,.0f}{limit}"
        )


def is_implementation(module: Module, modules: dict[str, Module]) -> bool:
    """True if the module adds a command, or its folder has an interface (base.py) or a table (__init__.py)."""
    folder = module.folder
    table = modules.get(folder)
    return f"{folder}.base" in modules or (table is not None and table.lines > 10)


def counts(root: Path) -> list[Count]:
    """The rows of the house, counted now."""
    modules = find_modules(root)
    known = frozenset(modules)
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for imported in imports_of(module, known):
            importers[imported.target].add(module.name)
    single = [
        name
        for name, module in modules.items()
        if len(importers[name]) == 1 and module.path.name != "__init__.py" and not is_implementation(module, modules)
    ]
    classes = Counter(n.name for m in modules.values() for n in ast.walk(m.tree) if isinstance(n, ast.ClassDef))
    lines = sum(m.lines for m in modules.values())
    files = [m for m in modules.values() if m.lines]
    tests = list((root / "tests").rglob("*.py"))
    return [
        Count("source lines", lines, 69_088),
        Count("source files that are not empty", len(files), 368),
        Count("lines of a file, median", statistics.median(m.lines for m in files)),
        Count("lines of a file, largest", max(m.lines for m in files), 450),
        Count("files that exactly one other imports", len(single), 40),
        Count("class names that occur twice", sum(n > 1 for n in classes.values()), 5),
        Count("comments per 100 lines", 100 * sum(m.comments() for m in modules.values()) / lines, 4, at_least=True),
        Count("test lines", sum(p.read_text().count("\n") for p in tests), 49_230),
    ]


def main(arguments: list[str]) -> int:
    root = Path(__file__).resolve().parents[1]
    rows = counts(root)
    print("\n".join(str(row) for row in rows))
    broken = [line for rule in RULES for line in rule(root)]
    print("\n".join(broken))
    if "--single" in arguments:
        modules = find_modules(root)
        known = frozenset(modules)
        for name, module in modules.items():
            by = {m.name for m in modules.values() for i in imports_of(m, known) if i.target == name}
            if len(by) == 1 and module.path.name != "__init__.py" and not is_implementation(module, modules):
                print(f"{name} ({module.lines}) <- {by.pop()}")
    return 1 if broken or not all(row.kept for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
