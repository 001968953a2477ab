"""The house's rules: who may import whom, what files are called, what lies at the top."""

from __future__ import annotations

import ast
import graphlib
import importlib.util
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

MAY_IMPORT = {
    "stages": set(),
    "serving": {"stages"},
    "trainer": {"stages"},
    "loadtest": {"stages", "serving"},
}
MATHS = {
    "stages.architecture",
    "stages.errors",
    "stages.noise",
    "stages.partition",
    "stages.randomness",
    "stages.codes",
    "stages.layers",
    "stages.block",
    "stages.ar",
    "stages.codec",
    "stages.samplers",
    "stages.sweep",
    "stages.manifest",
    "stages.probe",
    "stages.weights",
    "stages.checkpoint",
    "stages.inspect",
    "stages.families",
    "stages.guesses",
    "stages.llama",
    "stages.llama.architecture",
    "stages.llama.rotary",
    "stages.llama.stage",
    "stages.memory",
    "stages.weights_file",
    "stages.pretrained",
    "stages.pretrained.config",
    "stages.pretrained.cut",
    "stages.pretrained.gate",
    "stages.pretrained.gguf_byte_level",
    "stages.pretrained.gguf_file",
    "stages.pretrained.gguf_sentencepiece",
    "stages.pretrained.gguf_tokenizer",
    "stages.pretrained.gguf_vocabulary",
    "stages.pretrained.huggingface",
    "stages.pretrained.importing",
    "stages.pretrained.licences",
    "stages.pretrained.source",
    "stages.pretrained.summary",
    "stages.pretrained.tokens",
    "stages.pretrained.variant",
    "stages.pretrained.walk",
    "stages.backends",
    "stages.backends.agreement",
    "stages.backends.attention",
    "stages.backends.base",
    "stages.backends.eager",
    "stages.backends.packed_llama",
    "stages.backends.product",
    "stages.backends.graph",
    "stages.backends.independence",
    "stages.backends.onnx",
    "stages.backends.packed",
    "stages.backends.packed_layer",
    "stages.backends.rows",
}
NETWORK = {"grpc", "asyncio"}
APART = {
    "stages.engine": {"stages.host", "stages.relay", "stages.server", "stages.service", "stages.subscribers"},
    "stages.hop": {"stages.engine", "stages.host", "stages.relay"},
    "stages.sessions": {"stages.engine", "stages.host", "stages.relay"},
    "stages.relay": {"stages.engine", "stages.host", "torch"},
    "serving.drafting": {"serving.ring", "serving.service", "serving.router", "stages.relay", "stages.host"},
    "serving.client": {"torch", "serving.ring", "stages.host"},
}
"""Modules, and what they must not reach: who computes or guesses does not know who sends."""
BACKENDS = "stages.backends"
OPTIONAL_IN_BACKENDS = "onnxruntime"
TOP_FOLDERS = {"proto", "serving", "stages", "trainer", "loadtest", "tests", "docs", "deploy", "weights"}
NAMELESS = {"utils.py", "helpers.py"}


# Reading imports


def modules(root: Path) -> dict[str, Path]:
    """Every module of the four packages, by its dotted name."""
    found = {}
    for package in MAY_IMPORT:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def import_nodes(node: ast.AST, *, in_functions: bool, for_types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and not in_functions:
            continue
        elif is_type_checking(child) and not for_types:
            yield from import_nodes(ast.Module(child.orelse, []), in_functions=in_functions, for_types=for_types)
        else:
            yield from import_nodes(child, in_functions=in_functions, for_types=for_types)


@cache
def imports_in(text: str, *, in_functions: bool, for_types: bool) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """Of a file: many rules ask for the same ones."""
    return tuple(import_nodes(ast.parse(text), in_functions=in_functions, for_types=for_types))


def imports(name: str, path: Path, known: dict[str, Path], *, in_functions: bool, for_types: bool) -> set[str]:
    """What a module imports, by dotted names: `from stages import noise` is stages.noise where that is a module."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found = set()
    for node in imports_in(path.read_text(), in_functions=in_functions, for_types=for_types):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
            continue
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        wholes = {f"{base}.{alias.name}" for alias in node.names}
        found |= {whole if whole in known or base not in known else base for whole in wholes}
    return found - {name}


def is_network(name: str) -> bool:
    parts = name.split(".")
    return parts[0] in NETWORK or any(part.endswith(("_pb2", "_pb2_grpc")) for part in parts)


def is_within(name: str, others: set[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in others)


# The rules: each returns what breaks it


def forbidden_imports(root: Path) -> list[str]:
    known = modules(root)
    broken = []
    for name, path in known.items():
        package = name.partition(".")[0]
        for target in sorted(imports(name, path, known, in_functions=True, for_types=True)):
            other = target.partition(".")[0]
            if other in MAY_IMPORT and other != package and other not in MAY_IMPORT[package]:
                broken.append(f"{name} imports {target}")
    return broken


def ways_from(start: str, known: dict[str, Path], is_goal: Callable[[str], bool]) -> list[str]:
    """Ways from a module to a goal, through modules of the house and the packages that hold them."""
    found, ways, seen = [], [[start]], {start}
    while ways:
        way = ways.pop()
        name = way[-1]
        if is_goal(name):
            found.append(" -> ".join(way))
        elif name in known:
            following = imports(name, known[name], known, in_functions=True, for_types=False)
            following |= {name.rpartition(".")[0]} - {""}
            ways += [[*way, target] for target in sorted(following - seen)]
            seen |= following
    return found


def network_in_maths(root: Path) -> list[str]:
    known = modules(root)
    return [way for start in sorted(MATHS) for way in ways_from(start, known, is_network)]


def not_kept_apart(root: Path) -> list[str]:
    known = modules(root)
    return [
        way
        for start, others in APART.items()
        for way in ways_from(start, known, lambda name, others=others: is_within(name, others))
    ]


def backends_by_the_back_door(root: Path) -> list[str]:
    """Modules that import a particular backend, or what only one of them needs, instead of asking for it by name."""
    known = modules(root)
    broken = []
    for name, path in known.items():
        if is_within(name, {BACKENDS}):
            continue
        for target in sorted(imports(name, path, known, in_functions=True, for_types=True)):
            particular = target in known and target.startswith(f"{BACKENDS}.") and target != f"{BACKENDS}.base"
            if particular or is_within(target, {OPTIONAL_IN_BACKENDS}):
                broken.append(f"{name} imports {target}")
    return broken


def import_cycle(root: Path) -> list[str]:
    """One circle of imports that run when a module is loaded, or nothing."""
    known = modules(root)
    graph = {
        name: imports(name, path, known, in_functions=False, for_types=False) & known.keys()
        for name, path in known.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def nameless_files(root: Path) -> list[str]:
    folders = [root / folder for folder in (*MAY_IMPORT, "tests")]
    return [str(path.relative_to(root)) for folder in folders for path in folder.rglob("*.py") if path.name in NAMELESS]


def stray_folders(files: list[str]) -> list[str]:
    folders = {Path(file).parts[0] for file in files if len(Path(file).parts) > 1}
    return sorted(folder for folder in folders - TOP_FOLDERS if not folder.startswith("."))


def silent_test_files(root: Path) -> list[str]:
    def asserts(node: ast.AST) -> bool:
        return isinstance(node, ast.Assert) or (isinstance(node, ast.Attribute) and node.attr == "raises")

    return [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("test_*.py"))
        if not any(asserts(node) for node in ast.walk(ast.parse(path.read_text())))
    ]


# The house keeps them


def test_packages_import_only_those_they_may_know() -> None:
    broken = forbidden_imports(ROOT)
    assert not broken, f"allowed are only stages <- serving <- loadtest and stages <- trainer: {broken}"


def test_every_package_is_installed() -> None:
    """An editable install finds them all the same: a built one would miss them."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.relative_to(ROOT).parent.parts) for name in MAY_IMPORT for path in (ROOT / name).rglob("*.py")
    }
    assert sorted(listed) == sorted(found)


def test_every_maths_module_exists() -> None:
    missing = sorted(MATHS - modules(ROOT).keys())
    assert not missing, f"the list MATHS in this file names modules that are not there: {missing}"


def test_maths_knows_nothing_of_the_network() -> None:
    broken = network_in_maths(ROOT)
    assert not broken, f"model maths must not reach grpc, asyncio or generated stubs: {broken}"


def test_who_computes_does_not_know_who_sends() -> None:
    missing = sorted(APART.keys() - modules(ROOT).keys())
    assert not missing, f"the list APART in this file names modules that are not there: {missing}"
    broken = not_kept_apart(ROOT)
    assert not broken, f"these must not reach each other: {broken}"


def test_backends_are_asked_for_by_name() -> None:
    broken = backends_by_the_back_door(ROOT)
    assert not broken, f"use stages.backends.backend_named and the interface in stages.backends.base: {broken}"


def test_imports_make_no_circle() -> None:
    cycle = import_cycle(ROOT)
    assert not cycle, f"these modules import each other in a circle: {' -> '.join(cycle)}"


def test_files_are_named_by_what_they_hold() -> None:
    broken = nameless_files(ROOT)
    assert not broken, f"name these files by the noun they hold: {broken}"


def test_top_level_has_only_the_rooms_of_the_house() -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("not a git checkout: what belongs to the project cannot be told from what lies about")
    broken = stray_folders(listing.stdout.splitlines())
    assert not broken, f"no room for these top-level folders: {broken}; there are {sorted(TOP_FOLDERS)}"


def test_every_test_file_asserts_something() -> None:
    broken = silent_test_files(ROOT)
    assert not broken, f"these test files have neither an assert nor a pytest.raises: {broken}"


# The rules can be broken


def plant(root: Path, sources: dict[str, str]) -> Path:
    for name, source in sources.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("stages/block.py", "import serving.cli", "stages.block imports serving.cli"),
        ("serving/cli.py", "def late():\n    from trainer.data import read", "serving.cli imports trainer.data.read"),
        ("trainer/data.py", "from loadtest import wan", "trainer.data imports loadtest.wan"),
        ("serving/__init__.py", "if TYPE_CHECKING:\n    import trainer", "serving imports trainer"),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path: Path, file: str, source: str, message: str) -> None:
    plant(tmp_path, {"loadtest/wan.py": "import stages.noise, serving.cli", file: source})
    assert forbidden_imports(tmp_path) == [message]


@pytest.mark.parametrize(
    "source",
    ["import asyncio", "import grpc.aio", "from stages.v1 import stage_pb2", "def late():\n    from grpc import aio"],
)
def test_network_behind_maths_is_caught(tmp_path: Path, source: str) -> None:
    plant(tmp_path, {"stages/noise.py": "from stages.wire import send", "stages/wire.py": source})
    (way,) = network_in_maths(tmp_path)
    assert way.startswith("stages.noise -> stages.wire -> ")


def test_network_in_the_package_that_holds_the_maths_is_caught(tmp_path: Path) -> None:
    plant(tmp_path, {"stages/__init__.py": "import grpc", "stages/noise.py": ""})
    assert network_in_maths(tmp_path) == ["stages.noise -> stages -> grpc"]


def test_maths_may_import_maths(tmp_path: Path) -> None:
    plant(tmp_path, {"stages/block.py": "import torch\nfrom . import noise", "stages/noise.py": "import math"})
    assert network_in_maths(tmp_path) == []


def test_an_engine_that_knows_its_host_is_caught(tmp_path: Path) -> None:
    plant(tmp_path, {"stages/engine.py": "from stages import queue", "stages/queue.py": "from stages.host import Host"})
    plant(tmp_path, {"stages/host.py": "import grpc.aio"})
    assert not_kept_apart(tmp_path) == ["stages.engine -> stages.queue -> stages.host"]


def test_a_guesser_that_asks_the_hosts_is_caught(tmp_path: Path) -> None:
    plant(tmp_path, {"serving/drafting.py": "def late():\n    from serving.ring import Ring", "serving/ring.py": ""})
    assert not_kept_apart(tmp_path) == ["serving.drafting -> serving.ring"]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("from stages.backends.packed import PackedBlock", "stages.backends.packed"),
        ("def late():\n    import onnxruntime", "onnxruntime"),
    ],
)
def test_a_backend_by_the_back_door_is_caught(tmp_path: Path, source: str, target: str) -> None:
    plant(tmp_path, {"stages/backends/__init__.py": "", "stages/backends/base.py": ""})
    plant(tmp_path, {"stages/backends/packed.py": "import onnxruntime", "serving/local.py": source})
    plant(tmp_path, {"stages/parts.py": "from stages.backends import backend_named\nimport stages.backends.base"})
    assert backends_by_the_back_door(tmp_path) == [f"serving.local imports {target}"]


def test_a_circle_is_caught(tmp_path: Path) -> None:
    plant(tmp_path, {"stages/a.py": "from stages import b", "stages/b.py": "from .a import name"})
    assert set(import_cycle(tmp_path)) == {"stages.a", "stages.b"}


def test_imports_for_types_and_in_functions_make_no_circle(tmp_path: Path) -> None:
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import stages.b"
    late = "def late():\n    import stages.a"
    plant(tmp_path, {"stages/a.py": for_types, "stages/b.py": "import stages.c", "stages/c.py": late})
    assert import_cycle(tmp_path) == []


def test_other_broken_rules_are_caught(tmp_path: Path) -> None:
    plant(tmp_path, {"serving/utils.py": "", "tests/stages/test_nothing.py": "def test_it():\n    print('fine')"})
    assert nameless_files(tmp_path) == ["serving/utils.py"]
    assert silent_test_files(tmp_path) == ["tests/stages/test_nothing.py"]
    assert stray_folders(["README.md", ".ci/run", "docs/wire.md", "misc/notes.md"]) == ["misc"]
