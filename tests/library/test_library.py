"""The library: what is compiled is found again, made by one process, replaced, and removed.

Compilation is replaced by a copy of an artifact: tests/cli/test_cli_library.py has the real one.
"""

import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import picompile.compile
from helpers.support import BUNDLED_MODEL
from picompile.config import CompileOptions
from picompile.errors import UsageError
from picompile.hub import Download, ModelName
from picompile.library import Library, LibraryOptions, OpenModel, open_compiled, open_model, store
from picompile.library.entry import InUse
from picompile.progress import NoProgress, Progress

NAME = ModelName("a/b")


class Compiler:
    """Stands for `compile_model` and `download`: copies an artifact, and counts."""

    def __init__(self, artifact: Path) -> None:
        self.artifact = artifact
        self.calls: list[tuple[Any, CompileOptions]] = []
        self.commit = "1" * 40
        self.seconds = 0.0

    def compile(self, model: Any, output: Path, options: CompileOptions, progress: Progress) -> None:
        self.calls.append((model, options))
        time.sleep(self.seconds)
        shutil.copytree(self.artifact, output, dirs_exist_ok=True)

    def download(self, name: ModelName, progress: Progress, memory_bytes: int) -> Download:
        return Download(name, self.commit, BUNDLED_MODEL, (BUNDLED_MODEL / name.repo / self.commit / "config.json",))


@pytest.fixture
def compiler(tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    found = Compiler(tiny_artifact)
    monkeypatch.setattr(picompile.compile, "compile_model", found.compile)
    monkeypatch.setattr(store, "download", found.download)
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "library"))
    monkeypatch.delenv(store.BUDGET_VARIABLE, raising=False)
    monkeypatch.delenv("PICOMPILE_TARGET", raising=False)
    return found


def obtained(model: ModelName | Path = NAME, refresh: bool = False, **options: Any) -> Path:
    return Library().obtain(model, LibraryOptions(**options), NoProgress(), refresh=refresh).folder


def test_a_model_is_compiled_once(compiler: Compiler) -> None:
    assert obtained() == obtained()
    assert len(compiler.calls) == 1
    model, options = compiler.calls[0]
    assert model == BUNDLED_MODEL
    assert (options.sequences, options.quant, options.context) == (4, None, None)


def test_other_options_make_another_artifact(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [obtained(), obtained(context=32), obtained(quant="q8")]
    monkeypatch.setenv("PICOMPILE_TARGET", "cpu")
    found.append(obtained())
    assert len({*found}) == len(compiler.calls) == 4
    assert [options.target for _, options in compiler.calls][-1] == "cpu"


def test_a_path_is_compiled_again_when_its_files_change(compiler: Compiler, tmp_path: Path) -> None:
    model = Path(shutil.copytree(BUNDLED_MODEL, tmp_path / "model"))
    old = obtained(model)
    (model / "README.md").write_text("changed")
    assert obtained(model) == old
    os.utime(model / "model.safetensors", (1, 1))
    new = obtained(model)
    assert new != old and len(compiler.calls) == 2
    assert [entry.folder for entry in Library().entries()] == [new] and not old.exists()


def test_pull_compiles_again_only_for_another_commit(compiler: Compiler) -> None:
    folder = obtained()
    assert obtained(refresh=True) == folder and len(compiler.calls) == 1
    compiler.commit = "2" * 40
    assert obtained() == folder and len(compiler.calls) == 1
    assert obtained(refresh=True) == folder and len(compiler.calls) == 2
    assert [entry.commit for entry in Library().entries()] == ["2" * 40]


def test_two_names_of_the_same_files_are_one_artifact(compiler: Compiler) -> None:
    library, exact = Library(), ModelName("a/b", choice="Q4_0")
    folder = obtained()
    assert obtained(exact) == folder and len(compiler.calls) == 1
    # The second time the hub is not asked.
    compiler.commit = "2" * 40
    assert obtained(exact) == folder == obtained()
    (entry,) = library.entries()
    assert entry.names == ("a/b", str(exact)) == (entry.name, *entry.to_json()["also"])
    assert library.named("a/b") == library.named(str(exact)) == [entry]
    # Other options, and other files, are other artifacts.
    assert obtained(exact, context=32) != folder and len(compiler.calls) == 2
    assert obtained(exact, refresh=True) != folder and len(compiler.calls) == 3
    assert [each.commit for each in library.entries() if each.context == entry.context] == ["2" * 40] * 2
    library.remove(library.named(str(exact))[0])
    assert obtained(exact) != folder and len(compiler.calls) == 4


def test_one_of_several_compiles_and_the_others_wait(compiler: Compiler) -> None:
    compiler.seconds = 0.3
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(obtained())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found}) == 1 and len(found) == 4 and len(compiler.calls) == 1


def test_a_failed_compilation_leaves_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise UsageError("no")

    monkeypatch.setattr(picompile.compile, "compile_model", fail)
    with pytest.raises(UsageError, match="no"):
        obtained()
    assert Library().entries() == [] and [*Library().folder.iterdir()] == []


@pytest.mark.parametrize("damage", ["record", "manifest", "artifact"])
def test_what_is_damaged_is_made_again(compiler: Compiler, damage: str) -> None:
    folder = obtained()
    if damage == "record":
        folder.with_name(f"{folder.name}.json").write_text('{"name": 1}')
    elif damage == "manifest":
        (folder / "manifest.json").write_text("{}")
    else:
        shutil.rmtree(folder)
    assert obtained() == folder and len(compiler.calls) == 2


def test_an_artifact_of_another_version_is_replaced(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    old = obtained()
    monkeypatch.setattr("picompile.library.entry.__version__", "9.9")
    new = obtained()
    assert new != old and not old.exists() and [entry.folder for entry in Library().entries()] == [new]


def test_the_least_recently_used_goes_first(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tiny_artifact: Path
) -> None:
    size = sum(file.stat().st_size for file in tiny_artifact.rglob("*") if file.is_file())
    monkeypatch.setenv(store.BUDGET_VARIABLE, f"{2 * size + 1000}")
    names = [ModelName(f"a/{letter}") for letter in "xyz"]
    for age, name in zip((300, 100), names, strict=False):
        folder = obtained(name)
        os.utime(folder.with_name(f"{folder.name}.json"), (time.time() - age, time.time() - age))
    obtained(names[0])
    obtained(names[2])
    assert [entry.name for entry in Library().entries()] == ["a/z", "a/x"]
    with open_model("hf://a/x", LibraryOptions(), NoProgress()):
        obtained(names[1])
        assert sorted(entry.name for entry in Library().entries()) == ["a/x", "a/y"]


def test_the_budget_must_be_a_size(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(store.BUDGET_VARIABLE, "much")
    with pytest.raises(UsageError, match="PICOMPILE_MODELS_BUDGET: 'much' is no size"):
        obtained()


def test_what_is_in_use_is_not_removed(compiler: Compiler) -> None:
    folder = obtained()
    (entry,) = Library().entries()
    lock = InUse(folder)
    with pytest.raises(UsageError, match="a/b is in use by another picompile"):
        Library().remove(entry)
    lock.close()
    Library().remove(entry)
    assert [*Library().folder.iterdir()] == []


def test_what_a_text_opens(compiler: Compiler, tiny_artifact: Path, tmp_path: Path) -> None:
    def opened(text: object, **options: Any) -> OpenModel:
        return open_model(str(text), LibraryOptions(**options), NoProgress())

    assert opened(tiny_artifact).artifact == tiny_artifact and compiler.calls == []
    with pytest.raises(UsageError, match="--context 32 applies to a model that is compiled for this"):
        opened(tiny_artifact, context=32)
    with opened(BUNDLED_MODEL) as found:
        assert found.name == "tiny-reglu" and found.artifact.parent == Library().folder
    with opened("a/b:Q4_K_M") as found:
        assert found.name == "a/b:Q4_K_M"
    with pytest.raises(UsageError, match="qwen3: no such file or folder; a model on the hub is named ORG/REPO"):
        opened("qwen3")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match="neither a folder nor a GGUF file"):
        opened(tmp_path / "a.txt")


def test_what_must_be_compiled_already(compiler: Compiler, tiny_artifact: Path) -> None:
    assert open_compiled(str(tiny_artifact)) == tiny_artifact
    with pytest.raises(UsageError, match="a/b: not compiled yet"):
        open_compiled("a/b")
    folder = obtained()
    assert open_compiled("a/b") == open_compiled("hf://a/b") == folder
    assert len(compiler.calls) == 1


def test_list_has_json(compiler: Compiler) -> None:
    folder = obtained()
    (entry,) = Library().entries()
    found = json.loads(json.dumps(entry.to_json()))
    assert (found["name"], found["folder"], found["context"]) == ("a/b", str(folder), 64)


@pytest.mark.parametrize("given", [{"context": 0}, {"quant": "q99"}])
def test_options_are_checked_first(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        LibraryOptions(**given)
