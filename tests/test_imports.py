"""What an import loads: nothing heavy where a command must begin at once, nothing that is not declared.

Who may import whom is in pyproject.toml, `[tool.importlinter]`.
"""

import subprocess
import sys
from collections.abc import Iterable

import grimp
import pytest

from helpers.support import ROOT

RUNTIME = ROOT / "runtime" / "picompile_runtime"
RUNTIME_DEPENDENCIES = {"numpy", "tokenizers", "jinja2"}
# Those of the runtime's extra `serve`, for its folder serving/ alone.
SERVING_DEPENDENCIES = {"starlette", "uvicorn", "pydantic", "pydantic_core", "prometheus_client", "llguidance", "h11"}
HEAVY = {"torch", "tvm", "tvm_ffi", "transformers", "picompile_passes", "picompile_codegen"}


def test_runtime_needs_only_its_declared_dependencies() -> None:
    graph = grimp.build_graph("picompile_runtime", include_external_packages=True)
    foreign = {name for name in graph.modules if graph.is_module_squashed(name)} - set(sys.stdlib_module_names)
    users = {name: graph.find_modules_that_directly_import(name) for name in foreign}
    serving = {name for name in foreign if all(".serving." in user for user in users[name])}
    assert foreign - serving == RUNTIME_DEPENDENCIES
    assert serving <= SERVING_DEPENDENCIES and "starlette" in serving


def loaded_by(statement: str, packages: Iterable[str] = HEAVY) -> set[str]:
    """Which of the packages a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*(set({sorted(packages)!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


RUNTIME_MODULES = [
    ".".join(path.relative_to(ROOT / "runtime").with_suffix("").parts)
    for path in sorted(RUNTIME.rglob("*.py"))
    if path.stem not in ("__init__", "__main__")
]


@pytest.mark.parametrize(
    "statement",
    [
        "import picompile; picompile.CompileOptions(quant='q8'); picompile.load",
        "import picompile.cli, picompile.machine, picompile.errors, picompile.progress, picompile.config",
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


@pytest.mark.slow("imports all there is in a process of its own")
def test_passes_bring_no_compiler_and_public_names_resolve() -> None:
    # In a process of its own: it loads everything there is.
    names = "[getattr(picompile, name) for name in picompile.__all__]"
    statement = (
        f"import picompile.passes, picompile_passes.dialect, sys; print(*{HEAVY!r} & sys.modules.keys()); {names}"
    )
    loaded = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True).stdout
    assert set(loaded.split()) == {"torch", "picompile_passes"}
