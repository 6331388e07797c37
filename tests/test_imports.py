"""Who may import whom: DESIGN's rule, read from the source and tried in fresh interpreters."""

import ast
import subprocess
import sys
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
HEAVY = ("torch", "tvm", "tvm_ffi", "transformers", "picompile_passes", "picompile_codegen")


def python_files(package: str) -> list[Path]:
    return sorted(SOURCES[package].rglob("*.py"))


def imported_roots(path: Path) -> set[str]:
    """Top-level names of every import in a file, those inside functions too; relative ones stay in the package."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
        for name in imported_roots(path) & FORBIDDEN[package]
    }
    assert not wrong


def test_the_rule_sees_imports_inside_functions(tmp_path: Path) -> None:
    path = tmp_path / "lazy.py"
    path.write_text(
        "def f():\n    import torch.nn\n    from tvm import tir\n    importlib.import_module('rich.table')\n"
    )
    assert imported_roots(path) == {"torch", "tvm", "rich"}


def test_runtime_needs_only_its_declared_dependencies() -> None:
    used = {name for path in python_files("picompile_runtime") for name in imported_roots(path)}
    foreign = used - set(sys.stdlib_module_names) - {"picompile_runtime"}
    assert foreign <= RUNTIME_DEPENDENCIES


def loaded_by(statement: str) -> set[str]:
    """Which of the heavy packages a fresh interpreter has loaded after `statement`."""
    code = f"{statement}\nimport sys\nprint(*(set({HEAVY!r}) & set(sys.modules)))"
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
        "import picompile",
        "import picompile.runtime",
        "import picompile.cli",
        "import picompile.machine, picompile.errors, picompile.progress, picompile.compile",
        "import picompile_runtime\n" + "\n".join(f"import {name}" for name in RUNTIME_MODULES),
        "import picompile; picompile.CompileOptions(quant='q8'); picompile.load",
    ],
)
def test_light_imports_stay_light(statement: str) -> None:
    assert loaded_by(statement) == set()


def test_importing_passes_brings_no_compiler() -> None:
    loaded = loaded_by("import picompile.passes, picompile_passes.registry, picompile_passes.dialect")
    assert loaded == {"torch", "picompile_passes"}


def test_public_names_resolve() -> None:
    # In a process of its own: it loads everything there is.
    code = "import picompile\nfor name in picompile.__all__: getattr(picompile, name)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
