"""Who may import whom: the rules of CONTRIBUTING.md, read from the source and tried in fresh interpreters."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "picompile": ROOT / "picompile",
    "picompile_passes": ROOT / "passes" / "picompile_passes",
    "picompile_codegen": ROOT / "codegen" / "picompile_codegen",
    "picompile_runtime": ROOT / "runtime" / "picompile_runtime",
}
# Tests import tools and each other; a package imports only what stands here, nowhere in its files, lazily or not.
FORBIDDEN = {
    "picompile": set(),
    "picompile_codegen": {"picompile", "picompile_runtime", "transformers"},
    "picompile_passes": {"picompile", "picompile_codegen", "picompile_runtime", "tvm", "tvm_ffi", "transformers"},
    "picompile_runtime": {
        *("picompile", "picompile_codegen", "picompile_passes"),
        *("torch", "tvm", "tvm_ffi", "transformers", "safetensors", "highspy", "networkx", "typer", "rich"),
    },
}
RUNTIME_DEPENDENCIES = {"numpy", "tokenizers", "jinja2"}
# Those of the runtime's extra `serve`, for its folder serving/ alone.
SERVING = SOURCES["picompile_runtime"] / "serving"
SERVING_DEPENDENCIES = {"starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client", "llguidance", "h11"}
HEAVY = {"torch", "tvm", "tvm_ffi", "transformers", "picompile_passes", "picompile_codegen"}


def python_files(package: str) -> list[Path]:
    return sorted(SOURCES[package].rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported_roots(module: ast.Module) -> set[str]:
    """Top-level names of every import in a file, those inside functions too; relative ones stay in the package."""
    roots: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            roots.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant):
                roots.add(str(argument.value).partition(".")[0])
    return roots


@pytest.mark.parametrize("package", SOURCES)
def test_imports_point_one_way(package: str) -> None:
    files = python_files(package)
    assert files, f"{package} has no files where this test looks for them"
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imported_roots(parsed(path)) & FORBIDDEN[package]
    }
    assert not wrong


def foreign_imports(paths: Iterable[Path]) -> set[str]:
    """The imports of the runtime's files that are neither Python's nor the runtime's own."""
    used = {name for path in paths for name in imported_roots(parsed(path))}
    return used - set(sys.stdlib_module_names) - {"picompile_runtime"}


def test_runtime_needs_only_its_declared_dependencies() -> None:
    files = python_files("picompile_runtime")
    assert foreign_imports(path for path in files if SERVING not in path.parents) <= RUNTIME_DEPENDENCIES
    serving = foreign_imports(path for path in files if SERVING in path.parents)
    assert serving - RUNTIME_DEPENDENCIES <= SERVING_DEPENDENCIES
    assert "starlette" in serving, "the folder is where this test looks for it"


def loaded_by(statement: str, packages: Iterable[str] = HEAVY) -> set[str]:
    """Which of the packages a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*(set({sorted(packages)!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


RUNTIME_MODULES = [
    ".".join(path.relative_to(ROOT / "runtime").with_suffix("").parts)
    for path in python_files("picompile_runtime")
    if path.stem not in ("__init__", "__main__")
]


@pytest.mark.parametrize(
    "statement",
    [
        "import picompile; picompile.CompileOptions(quant='q8'); picompile.load",
        "import picompile.cli, picompile.machine, picompile.errors, picompile.progress, picompile.compile",
        "import picompile.runtime, picompile_runtime\n" + "\n".join(f"import {name}" for name in RUNTIME_MODULES),
    ],
)
def test_light_imports_stay_light(statement: str) -> None:
    assert loaded_by(statement) == set()


def test_what_does_not_serve_loads_nothing_of_the_extra() -> None:
    others = [name for name in RUNTIME_MODULES if ".serving." not in name]
    # The command lines read their options, and say what is missing, without it.
    light = [f"picompile_runtime.serving.{name}" for name in ("main", "options", "extra")]
    assert set(light) < set(RUNTIME_MODULES)
    statement = "\n".join(f"import {name}" for name in [*others, *light, "picompile.cli"])
    assert loaded_by(statement, SERVING_DEPENDENCIES) == set()


def test_passes_bring_no_compiler_and_public_names_resolve() -> None:
    # In a process of its own: it loads everything there is.
    names = "[getattr(picompile, name) for name in picompile.__all__]"
    statement = (
        f"import picompile.passes, picompile_passes.dialect, sys; print(*{HEAVY!r} & sys.modules.keys()); {names}"
    )
    loaded = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()) == {"torch", "picompile_passes"}


# Inside `picompile/`: modules and folders form no cycle, and folders keep to the order of CONTRIBUTING.md. Imports
# inside functions, those for type checkers alone, and names that are imported on first use count as all others do.

Graph = Mapping[str, set[str]]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in python_files("picompile")}


def imported_modules(module: str, tree: ast.Module, *, is_package: bool) -> Iterator[str]:
    """The modules of `picompile` that a file names: in imports, or as text that something is imported by."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports by their full name say where they point"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else str(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            text = package + node.value if is_package and node.value.startswith(".") else node.value
            if "." in text:
                yield text


@cache
def import_graph() -> dict[str, set[str]]:
    graph = {}
    for module, path in MODULES.items():
        found = imported_modules(module, parsed(path), is_package=path.name == "__init__.py")
        graph[module] = {name for name in found if name in MODULES} - {module}
    return graph


def grouped(graph: Graph, group: Callable[[str], str | None]) -> dict[str, set[str]]:
    """The graph of groups; a module without one is left out."""
    result: dict[str, set[str]] = {}
    for module, imported in graph.items():
        if (own := group(module)) is not None:
            others = {other for name in imported if (other := group(name)) not in (None, own)}
            result.setdefault(own, set()).update(str(other) for other in others)
    return result


def test_no_cycles() -> None:
    """None among modules, and in each folder none among its parts: a part is a module or a folder with all in it."""
    TopologicalSorter(import_graph()).prepare()
    for folder in (module for module, path in MODULES.items() if path.name == "__init__.py"):

        def part(module: str, inside: str = f"{folder}.") -> str | None:
            return inside + module.removeprefix(inside).partition(".")[0] if module.startswith(inside) else None

        TopologicalSorter(grouped(import_graph(), part)).prepare()


def layers_of_contributing() -> list[list[str]]:
    """The rows of the table, bottom first: which parts of `picompile/` each has."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| layer | parts of `picompile/`")[2].partition("\n\n")[0]
    rows = [line.split("|")[2] for line in table.splitlines()[2:]]
    return [[name.rstrip("/") for name in re.findall(r"`([\w/]+)`", row)] for row in rows]


def test_parts_import_only_from_layers_below() -> None:
    layers = layers_of_contributing()
    heights = {f"picompile.{name}": height for height, row in enumerate(layers) for name in row}

    def part(module: str) -> str:
        return ".".join([*module.split("."), "__init__"][:2])

    graph = grouped(import_graph(), part)
    assert sorted(heights) == sorted(graph), "the table names other parts than there are"
    assert len(heights) == sum(map(len, layers)), "the table names a part twice"
    wrong = [f"{name} -> {other}" for name, used in graph.items() for other in used if heights[other] >= heights[name]]
    assert sorted(wrong) == []


def test_every_kind_of_import_counts() -> None:
    tree = ast.parse(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from picompile.errors import UsageError\n"
        "def f():\n    import picompile.lazy, torch.nn\n    from picompile import version\n"
        "    importlib.import_module('rich.table')\n"
        "_HOME = {'plan': '.planning', 'compile': 'picompile.compile'}\n"
    )
    found = imported_modules("picompile.placement", tree, is_package=True)
    expected = {f"picompile.{name}" for name in ("errors", "lazy", "version", "placement.planning", "compile")}
    assert {name for name in found if name in MODULES} == expected
    assert imported_roots(tree) == {"typing", "picompile", "torch", "rich"}
