"""The two packages: what their wheels hold, and that either lives on when the other is uninstalled."""

import re
import subprocess
import sys
import venv
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


def packages_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name.partition("/")[0] for name in archive.namelist()} & OURS


def test_each_module_is_in_one_wheel(wheels: dict[str, Path]) -> None:
    assert packages_in(wheels["picompile"]) == OURS - {"picompile_runtime"}
    assert packages_in(wheels["picompile-runtime"]) == {"picompile_runtime"}


def test_wheels_hold_what_is_not_python(wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels["picompile"]) as archive:
        names = set(archive.namelist())
    sources = [p for name in OURS - {"picompile_runtime"} for p in (ROOT.glob(f"**/{name}/**/*")) if p.is_file()]
    wanted = {p.name for p in sources if p.suffix in (".c", ".h", ".cuh", ".css", ".js", ".jinja")}
    assert wanted <= {Path(name).name for name in names}


def test_both_have_the_one_version(wheels: dict[str, Path]) -> None:
    version = picompile_runtime.__version__
    assert picompile.__version__ == version
    assert all(wheel.name.split("-")[1] == version for wheel in wheels.values())
    requirement = re.search(r'"picompile-runtime==([^"]*)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert requirement is not None and requirement[1] == version


@pytest.mark.slow("installs two wheels into an environment of its own")
@pytest.mark.parametrize("removed", ["picompile", "picompile-runtime"])
def test_uninstalling_one_leaves_the_other(wheels: dict[str, Path], tmp_path: Path, removed: str) -> None:
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"

    def pip(*arguments: object) -> None:
        command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True)

    pip("install", "--no-deps", "--no-index", *wheels.values())
    pip("uninstall", "--yes", removed)
    code = f"import importlib.util as u; print(*(n for n in {sorted(OURS)!r} if u.find_spec(n)))"
    ran = subprocess.run([python, "-I", "-c", code], check=True, capture_output=True, text=True)
    assert set(ran.stdout.split()) == (
        {"picompile_runtime"} if removed == "picompile" else OURS - {"picompile_runtime"}
    )
