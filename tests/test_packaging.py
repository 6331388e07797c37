"""The two packages: what their wheels hold, and that they have one version."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import picompile
import picompile_runtime

ROOT = Path(__file__).resolve().parents[1]
OURS = {"picompile", "picompile_passes", "picompile_codegen", "picompile_runtime"}


def build_wheel(project: Path, folder: Path) -> Path:
    """Build the wheel of `project` with the hatchling that is installed here."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=project, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheel of each package, by its name."""
    folders = {"picompile": ROOT, "picompile-runtime": ROOT / "runtime"}
    return {name: build_wheel(folder, tmp_path_factory.mktemp("wheel")) for name, folder in folders.items()}


def test_each_module_is_in_one_wheel(wheels: dict[str, Path]) -> None:
    """So either lives on when the other is uninstalled. The compiler's has what is not Python too."""
    names = {name: set(zipfile.ZipFile(wheel).namelist()) for name, wheel in wheels.items()}
    assert set.intersection(*names.values()) == set()
    packages = {name: {file.partition("/")[0] for file in files} & OURS for name, files in names.items()}
    assert packages == {"picompile": OURS - {"picompile_runtime"}, "picompile-runtime": {"picompile_runtime"}}
    sources = [p for name in OURS - {"picompile_runtime"} for p in ROOT.glob(f"**/{name}/**/*") if p.is_file()]
    wanted = {p.name for p in sources if p.suffix in (".c", ".h", ".cuh", ".css", ".js", ".jinja")}
    assert wanted <= {Path(name).name for name in names["picompile"]}


def test_both_have_the_one_version(wheels: dict[str, Path]) -> None:
    version = picompile_runtime.__version__
    assert picompile.__version__ == version
    assert all(wheel.name.split("-")[1] == version for wheel in wheels.values())
    requirement = re.search(r'"picompile-runtime==([^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert requirement is not None and requirement[1] == version
