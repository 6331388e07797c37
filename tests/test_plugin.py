"""The plugin package under examples/, installed with pip into a folder of its own, as a user would use it."""

import importlib
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import picompile_runtime
from helpers.families import build, save
from helpers.reference import relative_error
from helpers.support import ROOT, BuildOnce, Cli, Ended
from picompile.compile import compile_model
from picompile.compile.passes import pipeline_passes
from picompile.config import CompileOptions
from picompile.frontend.hf import load_model
from picompile_passes.graph.materialize import materialize
from picompile_passes.pipeline import Pipeline

PACKAGE = ROOT / "examples" / "picompile-silent"
Run = Callable[..., subprocess.CompletedProcess[str]]

# What takes long in the README, and what stands for it here.
SHORTER = {"--tokens 20000": "--tokens 100", "-n 10000": "-n 100"}
# Not run with the other commands: the fixture does it, into another folder.
EXEMPT = "pip install ./examples/picompile-silent"


@pytest.fixture(scope="session")
def site(build_once: BuildOnce) -> Path:
    """The folder into which pip installed the package. Tests must not change it."""

    def install(folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        offline = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "--target", str(folder)]
        done = subprocess.run([*pip, *offline, str(PACKAGE)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return build_once("picompile-silent", install)


@pytest.fixture
def workplace(tmp_path: Path, tiny_model: Path) -> Path:
    """An empty folder with what the README's commands name; the model is a smaller one."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny-reglu").symlink_to(tiny_model)
    for name in ("README.md", "docs", "picompile", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "data").symlink_to(ROOT / "tests" / "data")
    return tmp_path


@pytest.fixture
def run(site: Path, commands: Path, tmp_path: Path) -> Run:
    """`run("picompile", "passes")`: a command where the package is installed, as it ended."""

    def command(*words: object) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
        # One thread: tests run side by side, and nothing here is large.
        settings = {"PATH": path, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        settings["PYTEST_ADDOPTS"] = "-p no:cacheprovider"
        settings["PICOMPILE_TARGET"] = "native"
        environment = os.environ | settings
        return subprocess.run(list(map(str, words)), cwd=tmp_path, env=environment, capture_output=True, text=True)

    return command


def readme() -> str:
    return (PACKAGE / "README.md").read_text(encoding="utf-8")


def readme_commands() -> list[str]:
    blocks = re.findall(r"```console\n(.*?)```", readme(), re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]


@pytest.mark.slow("installs the plug-in into an environment of its own")
def test_every_command_of_the_readme_runs(run: Run, workplace: Path) -> None:
    commands = readme_commands()
    commands.remove(EXEMPT)
    assert "python -m pytest examples/picompile-silent" in commands
    for command in commands:
        for text, shorter in SHORTER.items():
            command = command.replace(text, shorter)
        done = run("bash", "-c", command)
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stderr == "", command
    origins = {row["name"]: row["origin"] for row in json.loads(run("picompile", "passes", "--json").stdout)}
    assert origins["count-weight-bytes"] == origins["drop-silent-neurons"] == "picompile-silent"
    assert origins["quantize"] == "picompile"
    explained = {name: run("picompile", "passes", "--explain", name).stdout for name in origins}
    assert " ".join(explained["drop-silent-neurons"].split()).count("counts str needed") == 1
    assert "gives       one of the stage it was given\n" in explained["count-weight-bytes"]
    (noted,) = (workplace / "build" / "dump").glob("*_count-weight-bytes.txt")
    # Gate, up and down: 200 neurons of 96 columns each, in float32.
    block = 3 * 200 * 96
    assert f"layer 0, part block, weight_bytes {block * 4}, flops {block * 2}" in noted.read_text(encoding="utf-8")
    counts = json.loads((workplace / "build" / "counts.json").read_text(encoding="utf-8"))
    assert {layer: len(numbers) for layer, numbers in counts.items()} == {"0": 200, "1": 200}
    left = {layer: sum(count >= 20 for count in numbers) for layer, numbers in counts.items()}
    assert all(0 < count < 200 for count in left.values())
    report = json.loads((workplace / "build" / "dropped" / "report.json").read_text(encoding="utf-8"))
    assert {str(part["layer"]): part["neurons"] for part in report["ffn"]} == left
    whole, dropped = (workplace / "build" / name / "weights.safetensors" for name in ("whole", "dropped"))
    assert dropped.stat().st_size < whole.stat().st_size


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed in this process."""
    monkeypatch.syspath_prepend(str(site))
    importlib.invalidate_caches()


@pytest.mark.slow("installs the plug-in into an environment of its own")
def test_the_python_of_the_readme_prints_what_it_says(
    installed: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", readme(), re.DOTALL)
    # It writes nothing, and the figure is that of the bundled model.
    monkeypatch.chdir(ROOT)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out.split()[0]
    assert f"That prints {printed}:" in readme()


@pytest.mark.slow("compiles models with the plug-in installed")
@pytest.mark.parametrize("name", ["tiny-llama", "opt-pre-norm"])
def test_the_artifact_computes_what_the_smaller_graph_does(
    name: str, tiny_model: Path, tmp_path: Path, installed: None
) -> None:
    """Dropped, then split into hot and cold, then packed: rows of rows of the checkpoint's matrices."""
    model = tiny_model if name == "tiny-llama" else tmp_path / "model"
    if model is not tiny_model:
        save(name, build(name), model)
    captured = load_model(model)
    counts = {layer: random.Random(layer).choices((0, 1, 2), k=captured.facts.ffn) for layer in (0, 1)}
    file = tmp_path / "counts.json"
    file.write_text(json.dumps(counts))
    left = [sum(map(bool, numbers)) for numbers in counts.values()]
    options = CompileOptions(
        quant="f16",
        kv_dtype="f32",
        hot={0: range(0, left[0], 3), 1: (left[1] - 1,)},
        passes=(f"drop-silent-neurons{{counts={file}}}",),
    )
    compile_model(captured, tmp_path / "artifact", options)
    graph_module = Pipeline(tuple(pipeline_passes(options)))(captured.graph_module).graph_module
    ids = list(range(3, 103))
    with torch.no_grad():
        expected = materialize(graph_module, captured.weights)(torch.tensor(ids), torch.arange(len(ids)))
    with picompile_runtime.load(tmp_path / "artifact", threads=2) as engine:
        scored = torch.from_numpy(np.concatenate([np.array(rows) for rows in engine.score(ids)]))
        engine.reset()
        decoded = torch.from_numpy(np.stack([engine.decode(token).reshape(-1) for token in ids]))
    assert relative_error(scored, expected) < 1e-5
    assert relative_error(decoded, expected) < 1e-5
    hot = [len(range(0, left[0], 3)), 1]
    report = json.loads((tmp_path / "artifact" / "report.json").read_text())
    sizes = {(part["layer"], part["part"]): part["neurons"] for part in report["ffn"]}
    assert sizes == {
        (layer, part): number
        for layer in (0, 1)
        for part, number in (("hot", hot[layer]), ("cold", left[layer] - hot[layer]))
    }


@pytest.mark.slow("installs the plug-in into an environment of its own")
def test_bad_input_is_one_line_and_leaves_nothing(
    installed: None, cli: Cli, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(workplace)
    Path("counts.json").write_text('{"1": [0, 1, 2]}')
    before = sorted(workplace.iterdir())
    for options, message in (
        ("counts=counts.json,at_least=x", "option at_least of pass drop-silent-neurons: 'x' is not a whole number"),
        ("counts=counts.json", "firing counts counts.json: layer 1 has 200 neurons, not 3"),
    ):
        ended = cli("compile", "models/tiny-reglu", "-o", "out", "--pass", f"drop-silent-neurons{{{options}}}")
        assert ended == Ended(2, "", f"error: {message}\n")
    main = importlib.import_module("picompile_silent.__main__").main
    for arguments, message in (
        (("models/tiny-reglu", "nothing.txt", "-o", "c.json"), "nothing.txt: there is no such file"),
        (("models/tiny-reglu", "README.md", "-o", "a/c.json"), "a/c.json: not a file in a folder that is there"),
    ):
        assert main(arguments) == 2
        assert capsys.readouterr() == ("", f"error: {message}\n")
    assert sorted(workplace.iterdir()) == before
