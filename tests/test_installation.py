"""The packages as users install them: from wheels and source distributions into an environment that has none of ours.

What runs there runs outside of the checkout, so files that a wheel lacks are missed.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from helpers.packages import PROJECTS, build
from helpers.support import BUNDLED_MODEL, BuildOnce

Run = Callable[..., subprocess.CompletedProcess[str]]

MODULES = ("picompile", "picompile_passes", "picompile_codegen", "picompile_runtime", "picompile_server")
# Packages of the environment that runs the tests.
OTHERS = Path(sysconfig.get_path("purelib"))
PIP = ("-m", "pip", "install", "--quiet", "--disable-pip-version-check")


def clean_environment(folder: Path) -> dict[str, str]:
    """Variables without any that lead to the checkout or to files of this user."""
    settings = {"XDG_CACHE_HOME": str(folder / "cache"), "PICOMPILE_CACHE": str(folder / "objects"), "COLUMNS": "100"}
    # NVIDIA's packages look for NVRTC in the folders of an environment, not along Python's path.
    settings["LD_LIBRARY_PATH"] = str(OTHERS / "nvidia" / "cuda_nvrtc" / "lib")
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings


def run_in(environment: Path, folder: Path) -> Run:
    """`run("picompile", "passes")`: a command of an environment, as it ended, which must be well."""

    def run(name: str, *words: object) -> subprocess.CompletedProcess[str]:
        command = [str(environment / "bin" / name), *map(str, words)]
        done = subprocess.run(
            command, cwd=folder, env=clean_environment(folder), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done

    return run


def make_environment(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)


def install(environment: Path, *words: object) -> None:
    command = [str(environment / "bin" / "python"), *PIP, *map(str, words)]
    done = subprocess.run(command, cwd="/", env=clean_environment(environment), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheels(build_once: BuildOnce) -> Sequence[Path]:
    """The wheels of the three packages."""

    def make(folder: Path) -> None:
        folder.mkdir()
        for project in PROJECTS.values():
            build(project, folder)

    return sorted(build_once("wheels", make).glob("*.whl"))


@pytest.fixture(scope="module")
def with_wheels(build_once: BuildOnce, wheels: Sequence[Path]) -> Path:
    """An environment with our wheels. It takes packages of others from the environment that runs the tests."""

    def make(folder: Path) -> None:
        make_environment(folder)
        (site,) = folder.glob("lib/*/site-packages")
        (site / "0_others.pth").write_text(f"{OTHERS}\n")
        # Path files of a folder that a path file names are not read: those of an editable installation must not be.
        for path_file in OTHERS.glob("*.pth"):
            if "editable" not in path_file.name:
                shutil.copy(path_file, site)
        install(folder, "--no-deps", "--no-index", *wheels)

    return build_once("environment-with-wheels", make)


@pytest.fixture
def run(with_wheels: Path, tmp_path: Path) -> Run:
    return run_in(with_wheels, tmp_path)


SLOW = pytest.mark.slow("installs packages into an environment of its own")


@SLOW
def test_installed_modules_are_used(run: Run, with_wheels: Path) -> None:
    code = f"import {', '.join(MODULES)}; print(*(m.__file__ for m in ({', '.join(MODULES)})), sep='\\n')"
    files = run("python", "-c", code).stdout.splitlines()
    assert len(files) == len(MODULES) and all(Path(file).is_relative_to(with_wheels) for file in files)
    assert run("picompile", "--version").stdout.startswith("picompile ")


@SLOW
def test_a_model_is_compiled_and_run(run: Run, tmp_path: Path) -> None:
    """Compiling needs the C sources, pages their templates and styles, GPU code its headers."""
    run("picompile", "compile", BUNDLED_MODEL, "-o", "tiny", "--target", "native")
    words = ("tiny", "-p", "class Reader:", "-n", "8")
    text = run("picompile", "run", *words).stdout
    assert text.strip() and run("picompile-run", *words).stdout == text
    run("picompile", "report", "tiny", "-o", "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<style>" in page and "feed-forward" in page
    run("picompile", "compile", BUNDLED_MODEL, "-o", "gpu", "--target", "4090")
    assert "tiny-reglu" in run("picompile", "inspect", "gpu").stdout


@SLOW
def test_tables_are_installed(run: Run) -> None:
    assert "LlamaForCausalLM" in run("picompile", "models").stdout
    assert json.loads(run("picompile", "doctor", "--json").stdout)["models"]


def serve_once(environment: Path, command: Sequence[str], folder: Path) -> None:
    """Start a server, get its page and an answer, and end it."""
    words = [str(environment / "bin" / command[0]), *command[1:], "--port", "0"]
    with subprocess.Popen(
        words, cwd=folder, env=clean_environment(folder), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            # The line that says that the model is loaded.
            address = next(line for line in server.stdout if line.startswith("serving ")).split()[-1]
            page = urllib.request.urlopen(address, timeout=60).read().decode()
            assert "<!doctype html>" in page.lower()
            body = json.dumps({"model": "tiny-artifact", "prompt": "word300", "max_tokens": 2}).encode()
            request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
            assert json.loads(urllib.request.urlopen(request, timeout=60).read())["choices"]
        finally:
            server.terminate()


@SLOW
@pytest.mark.parametrize("command", [("picompile", "serve"), ("picompile-serve",)], ids=["compiler", "server"])
def test_served(command: tuple[str, ...], with_wheels: Path, tiny_artifact: Path, tmp_path: Path) -> None:
    serve_once(with_wheels, [*command, str(tiny_artifact)], tmp_path)


@SLOW
def test_runtime_and_server_alone(wheels: Sequence[Path], tiny_artifact: Path, tmp_path: Path) -> None:
    """From two wheels and an index, as on a machine that only runs models: without torch, TVM or the compiler."""
    environment = tmp_path / "environment"
    make_environment(environment)
    ours = [wheel for wheel in wheels if wheel.name.startswith(("picompile_runtime", "picompile_server"))]
    try:
        install(environment, *ours)
    except AssertionError as error:
        pytest.skip(f"needs a package index: {error}")
    run = run_in(environment, tmp_path)
    installed = {row["name"] for row in json.loads(run("pip", "list", "--format", "json").stdout)}
    assert {"picompile-runtime", "picompile-server"} <= installed
    assert not {"torch", "apache-tvm", "transformers", "picompile"} & installed
    assert run("picompile-run", tiny_artifact, "-p", "word300", "-n", "2").stdout
    serve_once(environment, ["picompile-serve", str(tiny_artifact)], tmp_path)


@pytest.mark.slow("builds wheels", but=("picompile-runtime",))
@pytest.mark.parametrize("name", PROJECTS)
def test_a_source_distribution_makes_the_same_wheel(name: str, tmp_path: Path) -> None:
    for folder in ("sdist", "direct", "again"):
        (tmp_path / folder).mkdir()
    archive = build(PROJECTS[name], tmp_path / "sdist", "sdist")
    with tarfile.open(archive) as opened:
        assert all(member.isfile() for member in opened)
        opened.extractall(tmp_path / "source")
    (source,) = (tmp_path / "source").iterdir()
    direct, again = build(PROJECTS[name], tmp_path / "direct"), build(source, tmp_path / "again")
    assert direct.name == again.name
    first, second = (zipfile.ZipFile(wheel) for wheel in (direct, again))
    assert sorted(first.namelist()) == sorted(second.namelist())
    assert all(first.read(file) == second.read(file) for file in first.namelist() if "dist-info" not in file)
    assert any(file.endswith("licenses/LICENSE") for file in first.namelist())
