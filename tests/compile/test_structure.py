"""Kept structures: artifacts with the same bytes from what an earlier compilation of the same structure kept."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from helpers.gguf_blocks import save_llama_of_blocks
from helpers.gguf_files import byte_level_metadata, save_example
from helpers.gguf_mixtures import MIXTURES, save_mixture
from picompile.compile import compile_model
from picompile.compile.structure import key as keys
from picompile.compile.structure.key import structure_key
from picompile.compile.structure.record import read_structure
from picompile.config import CompileOptions
from picompile.errors import UnsupportedModelError
from picompile.progress import NoProgress, Noting
from picompile_codegen.build.object_cache import VARIABLE, cache_folder, find_object, keep_object

TYPES = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"), "Q4_K"),
    **dict.fromkeys(("token_embd", "attn_v", "ffn_down", "output"), "Q6_K"),
}
OPTIONS = CompileOptions(context=32, chunk=16)
# Compiles sys.argv[1] into sys.argv[2].
PROGRAM = """
import sys
from picompile.compile import compile_model
from picompile.config import CompileOptions
compile_model(sys.argv[1], sys.argv[2], CompileOptions(context=32, chunk=16, target="native"))
"""
# Each has an entry of its own, by its context: other processes read the others meanwhile.
DAMAGES = {"changed": 40, "cut": 48, "another": 56, "no structure": 64}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_llama_of_blocks(tmp_path / "model.gguf", TYPES)
    return tmp_path / "model.gguf"


@pytest.fixture
def nothing_captured(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets any compilation fail that captures its model, from the call on."""

    def begin() -> None:
        monkeypatch.setattr(
            "picompile.compile.driver.load_model", lambda model, activation: pytest.fail("the model was captured")
        )

    return begin


def example(folder: Path, **more: Any) -> Path:
    folder.mkdir()
    return save_example(folder, **more)


def contents(artifact: Path) -> dict[str, bytes]:
    return {str(path.relative_to(artifact)): path.read_bytes() for path in artifact.rglob("*") if path.is_file()}


def said(model: Path, artifact: Path, options: CompileOptions = OPTIONS) -> list[str]:
    progress = Noting(NoProgress())
    compile_model(model, artifact, options, progress)
    return progress.said


def test_the_second_artifact_has_the_same_bytes(
    file: Path, tmp_path: Path, nothing_captured: Callable[[], None]
) -> None:
    first = said(file, tmp_path / "a")
    nothing_captured()
    second = said(file, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert first == second and "weights as the checkpoint has them" in first[0]


@pytest.mark.slow("compiles a model in all steps", but=("gemma3]",))
@pytest.mark.parametrize("name", ["gemma3", "nemotron", "qwen3moe", "gpt-oss"])
def test_changed_norms_and_experts_have_a_structure(
    tmp_path: Path, nothing_captured: Callable[[], None], name: str
) -> None:
    save = save_mixture if name in MIXTURES else save_example
    file = save(tmp_path, name, type_name="Q8_0", **byte_level_metadata())
    said(file, tmp_path / "a")
    nothing_captured()
    said(file, tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_another_model_of_the_structure_has_its_own_weights_and_names(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_captured: Callable[[], None]
) -> None:
    other = tmp_path / "tuned.gguf"
    save_llama_of_blocks(other, TYPES, seed=1)
    with monkeypatch.context() as without:
        without.setenv(VARIABLE, "off")
        said(other, tmp_path / "long")
    said(file, tmp_path / "a")
    nothing_captured()
    said(other, tmp_path / "short")
    assert contents(tmp_path / "short") == contents(tmp_path / "long")
    assert contents(tmp_path / "short")["weights.safetensors"] != contents(tmp_path / "a")["weights.safetensors"]


@pytest.mark.slow("compiles in two processes")
def test_a_kept_structure_needs_neither_transformers_nor_tvm(file: Path, tmp_path: Path) -> None:
    program = PROGRAM + "print(*sorted({'torch', 'transformers', 'tvm', 'sympy'} & sys.modules.keys()))\n"
    ends = [
        subprocess.run(
            [sys.executable, "-c", program, file, tmp_path / name], check=True, capture_output=True, text=True
        )
        for name in "ab"
    ]
    assert ends[1].stdout.split() == ["torch"]
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.slow("compiles kernels in two processes")
def test_two_processes_keep_the_same_structure(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    running = [subprocess.Popen([sys.executable, "-c", PROGRAM, file, tmp_path / name]) for name in "ab"]
    assert [each.wait() for each in running] == [0, 0]
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.slow("compiles a model in all steps, twice", but=("another]",))
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_structure_is_made_again(file: Path, tmp_path: Path, damage: str) -> None:
    options = replace(OPTIONS, context=DAMAGES[damage])
    said(file, tmp_path / "a", options)
    key, folder = structure_key(file, options), cache_folder()
    assert key is not None and folder is not None
    entry = folder / f"{key.key}.object"
    good = entry.read_bytes()
    if damage == "no structure":
        keep_object(key.key, b"no structure")
    elif damage == "another":
        structure = read_structure(find_object(key.key) or b"")
        keep_object(key.key, replace(structure, constants=[["call", "os.system.default", [], {}, [], "f"]]).to_bytes())
    else:
        entry.write_bytes(good[:-1] if damage == "cut" else good[:-1] + bytes([good[-1] ^ 1]))
    said(file, tmp_path / "b", options)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert entry.read_bytes() == good


@pytest.mark.slow("compiles a model in all steps, twice")
def test_damaged_weights_are_refused_in_the_same_words(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(file, tmp_path / "a")
    tensor = next(each for each in GGUFReader(file).tensors if each.name == "blk.1.attn_q.weight")
    with file.open("r+b") as opened:
        opened.seek(tensor.data_offset)
        opened.write(np.array([np.nan, np.nan], np.float16).tobytes())
    messages = []
    for cache in (tmp_path / "cache", "off"):
        with monkeypatch.context() as patch, pytest.raises(UnsupportedModelError) as refused:
            if cache == "off":
                patch.setenv(VARIABLE, "off")
            said(file, tmp_path / "b")
        messages.append(str(refused.value))
    assert messages[0] == messages[1] and "NaN" in messages[0]
    assert not (tmp_path / "b").exists()


OTHERS: dict[str, dict[str, Any]] = {
    "context": {"context": 64},
    "chunk": {"chunk": 8},
    "sequences": {"sequences": 2},
    "kv_dtype": {"kv_dtype": "f32"},
    "activation_bits": {"activation_bits": "8"},
    "draft_tokens": {"draft_tokens": 0},
    "target": {"target": "native"},
    "predictor": {"predictor": "none"},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_options_have_another_key(file: Path, name: str) -> None:
    found = structure_key(file, OPTIONS)
    other = structure_key(file, replace(OPTIONS, **OTHERS[name]))
    assert found is not None and other is not None and found.key != other.key


def test_the_output_and_words_for_people_have_no_part_in_the_key(file: Path, tmp_path: Path) -> None:
    found = structure_key(file, OPTIONS)
    assert found == structure_key(file, replace(OPTIONS, overwrite=True))
    named = example(tmp_path / "named", **{"general.name": "A name", "tokenizer.chat_template": "{{ 1 }}"})
    other = example(tmp_path / "other", **{"general.name": "Another", "tokenizer.chat_template": "{{ 2 }}"})
    one, two = structure_key(named, OPTIONS), structure_key(other, OPTIONS)
    assert one is not None and two is not None and one.key == two.key


@pytest.mark.parametrize(
    "changes",
    [
        {"tokenizer.ggml.eos_token_id": 5},
        {"llama.rope.freq_base": 5000.0},
        {"type_name": "Q8_0"},
        {"without": "output.weight"},
    ],
    ids=["named token", "value", "type", "tensor"],
)
def test_other_headers_have_another_key(tmp_path: Path, changes: dict[str, Any]) -> None:
    first, other = example(tmp_path / "first"), example(tmp_path / "other", **changes)
    found, changed = (structure_key(each, OPTIONS) for each in (first, other))
    assert found is not None and changed is not None
    assert found.key != changed.key


def test_another_compiler_has_another_key(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = structure_key(file, OPTIONS)
    monkeypatch.setattr(keys, "compiler_identity", lambda: ("another",))
    other = structure_key(file, OPTIONS)
    monkeypatch.setattr(keys, "_c_compiler", lambda machine: ["another"])
    third = structure_key(file, OPTIONS)
    assert found is not None and other is not None and third is not None
    assert len({found.key, other.key, third.key}) == 3


def test_the_identity_changes_with_a_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "module.py"
    monkeypatch.setattr(keys, "_source_files", lambda package: iter([source]))
    found = set()
    for text in ("a = 1", "a = 2"):
        source.write_text(text)
        keys.compiler_identity.cache_clear()
        found.add(keys.compiler_identity())
    keys.compiler_identity.cache_clear()
    assert len(found) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"quant": "q8"}, {"quant": "4bit"}, {"predictor": "learned"}, {"dump_ir": Path("ir")}, {"passes": ("x",)},
        {"verify": False}, {"checkpoint_bound": 0.05}, {"hot": {0: [1]}}, {"skip": 0.01}, {"accelerator": "cpu"},
        {"target": "4090"}, {"bf16": "off"},
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)  # fmt: skip
def test_no_structure_is_kept_where_more_decides(file: Path, options: dict[str, Any]) -> None:
    assert structure_key(file, replace(OPTIONS, **options)) is None


def test_no_structure_is_kept_of_other_models(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-1])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    for model in (tmp_path / "cut.gguf", tmp_path / "folder", tmp_path / "none", object()):
        assert structure_key(model, OPTIONS) is None
    for name, value in (("_has_plugins", lambda: True), ("_c_compiler", lambda machine: None)):
        with monkeypatch.context() as patch:
            patch.setattr(keys, name, value)
            assert structure_key(file, OPTIONS) is None
    monkeypatch.setenv(VARIABLE, "off")
    assert structure_key(file, OPTIONS) is None
