"""What an import loads: nothing heavy where a command must begin at once, nothing that is not declared.

Who may import whom is in pyproject.toml, `[tool.importlinter]`.
"""

import subprocess
import sys
from collections.abc import Iterable
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from helpers.support import ROOT

RUNTIME = ROOT / "runtime" / "picompile_runtime"
RUNTIME_DEPENDENCIES = {"numpy", "tokenizers", "jinja2"}
SERVER = ROOT / "server" / "picompile_server"
SERVER_DEPENDENCIES = {"starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client", "llguidance", "h11"}
HEAVY = {"torch", "tvm", "tvm_ffi", "transformers", "picompile_passes.dialect", "picompile_codegen.specs"}


@pytest.mark.parametrize(
    ("package", "dependencies"),
    [
        ("picompile_runtime", RUNTIME_DEPENDENCIES),
        ("picompile_server", SERVER_DEPENDENCIES | {"numpy", "picompile_runtime"}),
    ],
)
def test_a_package_needs_only_its_declared_dependencies(package: str, dependencies: set[str]) -> None:
    graph = grimp.build_graph(package, include_external_packages=True)
    foreign = {name for name in graph.modules if graph.is_module_squashed(name)} - set(sys.stdlib_module_names)
    assert foreign == dependencies


def test_no_modules_import_in_a_circle() -> None:
    """Imports inside functions, and for type checkers, count as all others do."""
    graph = grimp.build_graph(
        "picompile", "picompile_passes", "picompile_codegen", "picompile_runtime", "picompile_server"
    )
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # a CycleError names the modules


def loaded_by(statement: str, packages: Iterable[str] = HEAVY) -> set[str]:
    """Which of the packages a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*(set({sorted(packages)!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def modules_of(package: Path) -> list[str]:
    """Return the names of all modules of a package that commands import."""
    return [
        ".".join(path.relative_to(package.parent).with_suffix("").parts)
        for path in sorted(package.rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ]


@pytest.mark.parametrize(
    "statement",
    [
        "import picompile; picompile.CompileOptions(quant='q8'); picompile.load",
        "import picompile.cli, picompile.machine, picompile.errors, picompile.progress, picompile.config",
        "\n".join(f"import {name}" for name in modules_of(RUNTIME) + modules_of(SERVER)),
    ],
)
def test_light_imports_stay_light(statement: str) -> None:
    assert loaded_by(statement) == set()


def test_command_lines_load_nothing_of_the_server() -> None:
    """They read their options without it."""
    statement = "import picompile_server.main, picompile_server.options, picompile.cli"
    assert loaded_by(statement, SERVER_DEPENDENCIES) == set()


@pytest.mark.slow("imports all there is in a process of its own")
def test_passes_bring_no_compiler_and_public_names_resolve() -> None:
    # In a process of its own: it loads everything there is.
    names = "[getattr(picompile, name) for name in picompile.__all__]"
    statement = (
        f"import picompile.passes, picompile_passes.dialect, sys; print(*{HEAVY!r} & sys.modules.keys()); {names}"
    )
    loaded = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()) == {"torch", "picompile_passes.dialect"}
