"""The three packages: what their wheels hold, and that they have one version."""

import re
import sys
import zipfile
from pathlib import Path

import pytest

import picompile
import picompile_runtime
from helpers.packages import PROJECTS, build
from helpers.support import ROOT
from picompile_passes.extras import EXTRAS

APART = {"picompile-runtime": "picompile_runtime", "picompile-server": "picompile_server"}
COMPILER = {"picompile", "picompile_passes", "picompile_codegen"}
OURS = COMPILER | set(APART.values())


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each package, by its name."""
    return {name: build(folder, tmp_path_factory.mktemp("wheel")) for name, folder in PROJECTS.items()}


def test_each_module_is_in_one_wheel(wheels: dict[str, Path]) -> None:
    """So each lives on when another is uninstalled. The compiler's has what is not Python too."""
    names = {name: set(zipfile.ZipFile(wheel).namelist()) for name, wheel in wheels.items()}
    assert sum(map(len, names.values())) == len(set.union(*names.values()))
    packages = {name: {file.partition("/")[0] for file in files} & OURS for name, files in names.items()}
    assert packages == {"picompile": COMPILER} | {name: {package} for name, package in APART.items()}
    sources = [p for name in COMPILER for p in ROOT.glob(f"**/{name}/**/*") if p.is_file()]
    wanted = {p.name for p in sources if p.suffix in (".c", ".h", ".cuh", ".css", ".js", ".jinja", ".json")}
    assert wanted <= {Path(name).name for name in names["picompile"]}


def test_what_reads_models_is_a_dependency() -> None:
    """Every package that `frontend/` imports comes with picompile, and none of an extra's."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    needed = {name.replace("-", "_") for name in re.findall(r'^    "([\w-]+)', listed, re.MULTILINE)}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "picompile" / "frontend").rglob("*.py")]
    imports = re.compile(r"^ *(?:import (?=\w+(?:\.\w+)*(?: as \w+)?$)|from (?=[\w.]+ import ))(\w+)", re.MULTILINE)
    imported = {name for text in sources for name in imports.findall(text)}
    assert "gguf" in imported
    assert imported - sys.stdlib_module_names - COMPILER - needed - {"picompile_runtime"} == set()


def test_errors_name_the_packages_of_extras() -> None:
    """As `install_extra` prints them; and the tools of developers are of the same versions."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = dict(re.findall(r"^(\w+) = (\[[^\]]*\])$", text, re.MULTILINE))
    assert {name: re.findall('"([^"]+)"', extras[name]) for name in EXTRAS} == {n: list(p) for n, p in EXTRAS.items()}
    development = text[text.index("\ndev = [") :]
    assert all(f'"{package}"' in development for packages in EXTRAS.values() for package in packages)
    assert extras["gguf"] == "[]"


def test_license_files_are_the_same() -> None:
    assert {(folder / "LICENSE").read_bytes() for folder in PROJECTS.values()} == {(ROOT / "LICENSE").read_bytes()}


def test_all_have_the_one_version(wheels: dict[str, Path]) -> None:
    version = picompile_runtime.__version__
    assert picompile.__version__ == version
    assert all(wheel.name.split("-")[1] == version for wheel in wheels.values())
    for project, needed in ((ROOT, APART), (ROOT / "server", {"picompile-runtime"})):
        text = (project / "pyproject.toml").read_text(encoding="utf-8")
        for name in needed:
            assert re.findall(f'"{name}==([^"]*)"', text) == [version]
