"""`--quant stored`: artifacts that keep the numbers of a quantized checkpoint."""

import ctypes
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.fx import GraphModule

import picompile_runtime
from helpers.fake_cuda.fixtures import emulate, fake_cuda, fake_library
from helpers.gguf_blocks import save_llama_of_blocks
from helpers.gguf_models import loaded
from helpers.reference import eager_logits, relative_error
from helpers.refusals import assert_refused
from helpers.support import BuildOnce, Cli, compile_for_test
from picompile.frontend.captured import Captured
from picompile.frontend.gguf.model import open_gguf
from picompile.frontend.stored.choice import choose_stored
from picompile.predictors.store import OverlayWeights
from picompile.testing import GraphShape, build, random_weights
from picompile_passes.formats import FORMATS as FORMS
from picompile_passes.graph.nodes import arguments, calls
from picompile_passes.graph.operands import INDEX_SELECT, LINEAR, SPARSE_FFN
from picompile_passes.graph.rewriter import Rewriter
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition

__all__ = ["fake_cuda", "fake_library"]

# Types of matrices: as llama.cpp's Q4_K_M has them, and as many as there can be at once.
USUAL = {
    **dict.fromkeys(("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"), "Q4_K"),
    **dict.fromkeys(("token_embd", "attn_v", "ffn_down", "output"), "Q6_K"),
}
TYPES = {
    "token_embd": "Q5_1", "attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "attn_output": "IQ4_XS",
    "ffn_gate": "Q2_K", "ffn_up": "Q3_K", "ffn_down": "NVFP4", "output": "Q6_K",
}  # fmt: skip
OTHER_TYPES = {
    "token_embd": "Q8_0", "attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q5_0", "attn_output": "IQ4_NL",
    "ffn_gate": "MXFP4", "ffn_up": "Q4_K", "ffn_down": "Q6_K", "output": "Q8_0",
}  # fmt: skip
SMALL_TYPES = {
    "token_embd": "TQ1_0", "attn_q": "IQ1_S", "attn_k": "IQ1_M", "attn_v": "IQ2_XXS", "attn_output": "IQ2_XS",
    "ffn_gate": "IQ2_S", "ffn_up": "IQ3_XXS", "ffn_down": "IQ3_S", "output": "TQ2_0",
}  # fmt: skip
FORMATS = {
    **dict.fromkeys(("IQ1_S", "IQ1_M"), "iq1"),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), "iq2"),
    **dict.fromkeys(("Q2_K", "TQ1_0", "TQ2_0"), "q2_k"),
    "IQ3_XXS": "iq3_xxs",
    "IQ3_S": "iq3_s",
    "Q4_0": "q4",
    "Q4_1": "q4_1",
    "Q5_0": "q5",
    "Q5_1": "q5_1",
    "Q8_0": "q8",
    "Q3_K": "q3_k",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "IQ4_NL": "iq4_nl",
    "IQ4_XS": "iq4_xs",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
}
SMALL = ("--context", 32, "--chunk", 16)
PROMPT, IDS = 9, [int(i) for i in torch.randint(0, 304, (20,), generator=torch.Generator().manual_seed(1))]


@pytest.fixture(scope="session")
def files(build_once: BuildOnce) -> Path:
    """GGUF files with quantized matrices, and `plain` with none. Tests must not change them."""

    def make(folder: Path) -> None:
        folder.mkdir()
        kinds = {"usual": USUAL, "some": TYPES, "others": OTHER_TYPES, "small": SMALL_TYPES, "plain": {}}
        for name, types in kinds.items():
            save_llama_of_blocks(folder / f"{name}.gguf", types)

    return build_once("stored-files", make)


def weight_formats(artifact: Path) -> Mapping[str, str]:
    found: Mapping[str, str] = json.loads((artifact / "report.json").read_text())["weight_formats"]
    return found


def logits_of(artifact: Path) -> torch.Tensor:
    """The logits behind the prompt, and behind each of the tokens that follow."""
    with picompile_runtime.load(artifact, threads=2) as engine:
        rows = [engine.prefill(IDS[:PROMPT]), *(engine.decode(token) for token in IDS[PROMPT:])]
    return torch.from_numpy(np.stack([row.reshape(-1) for row in rows]))


@pytest.mark.slow("compiles a model; two formats are fast", but=("usual",))
@pytest.mark.parametrize("name", ["usual", "some", "others", "small"])
def test_a_quantized_file_keeps_its_numbers(cli: Cli, files: Path, tmp_path: Path, name: str) -> None:
    """Without an option for that; with activations of 16 bits the logits are those of its numbers in float32."""
    file = files / f"{name}.gguf"
    ended = cli("compile", file, "-o", tmp_path / "artifact", *SMALL)
    assert ended.code == 0, ended.err
    opened = open_gguf(file)
    expected = {parameter: FORMATS[tensor.type] for parameter, tensor in opened.tensors.items() if tensor.type != "F32"}
    assert weight_formats(tmp_path / "artifact") == expected
    said = next(line for line in ended.err.splitlines() if "weights as the checkpoint has them: " in line)
    assert all(f" in {form}" in said for form in expected.values())
    assert "rounded again" not in ended.err
    logits = eager_logits(loaded(opened), IDS)[PROMPT - 1 :]
    assert relative_error(logits_of(tmp_path / "artifact"), logits) < 2e-3


@pytest.mark.slow("runs kernels for a GPU in the emulation")
@pytest.mark.parametrize("name", ["usual", "some", "others", "small"])
def test_a_gpu_keeps_the_numbers_of_what_fits_it(
    fake_cuda: ctypes.CDLL, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without an option for that. Prompts are read in halves."""
    file, artifact = files / f"{name}.gguf", tmp_path / "artifact"
    compile_for_test(file, artifact, target="4090", context=32, chunk=16)
    opened = open_gguf(file)
    expected = {parameter: FORMATS[tensor.type] for parameter, tensor in opened.tensors.items() if tensor.type != "F32"}
    found = weight_formats(artifact)
    # Projections of the same input and format lie one behind the other.
    assert set(found.values()) == set(expected.values())
    assert all(expected.get(name, form) == form for name, form in found.items())
    emulate(artifact, monkeypatch)
    assert relative_error(logits_of(artifact), eager_logits(loaded(opened), IDS)[PROMPT - 1 :]) < 2e-3


@pytest.mark.slow("compiles for a GPU")
def test_neurons_that_a_gpu_shares_with_the_host_take_few_bits(files: Path, tmp_path: Path) -> None:
    """Projections keep their numbers; a quarter of the neurons is hot."""
    hot = dict.fromkeys(range(2), range(0, 128, 4))
    compile_for_test(files / "usual.gguf", tmp_path / "artifact", target="4090", context=32, chunk=16, hot=hot)
    found = weight_formats(tmp_path / "artifact")
    assert {form for name, form in found.items() if "neurons" in name} == {"q4m"}
    assert {form for name, form in found.items() if "neurons" not in name} == {"q4_k", "q6_k"}


@pytest.mark.parametrize(("target", "bits"), [("cpu", (0, 0, 4)), ("4090", (4, 4, 6))])
def test_a_plan_counts_the_numbers_of_a_file(cli: Cli, files: Path, target: str, bits: tuple[int, ...]) -> None:
    """Without an option for that. The model is so small that the host has all of it, neuron by neuron with a GPU."""
    ended = cli("plan", files / "usual.gguf", "--firing", "100%", "--target", target, "--json")
    plan = json.loads(ended.out)
    assert plan["quant"] == "stored"
    found = {each["what"]: each["bytes"] for each in plan["memory"]}
    table, (gate, down) = 304 * FORMS["q6_k"].panel_row_bytes(256), ("q4_k", "q6_k")
    assert found["embedding"] == found["output head"] == table
    # Two layers of 512 neurons: of three vectors each, or in matrices as the file has them.
    alone = 2 * 512 * 3 * FORMS["q4m"].row_bytes(256)
    whole = 2 * (2 * 512 * FORMS[gate].panel_row_bytes(256) + 256 * FORMS[down].panel_row_bytes(512))
    least = whole if target == "cpu" else alone
    assert least <= found["cold neurons"] < 1.02 * least


@pytest.mark.slow("compiles for a GPU")
def test_a_plan_that_has_all_on_a_gpu_counts_what_compile_writes(cli: Cli, files: Path, tmp_path: Path) -> None:
    words = ("--target", "4090", "--host-bandwidth", "1MB/s", "--context", 32)
    plan = json.loads(cli("plan", files / "usual.gguf", "--firing", "100%", "--json", *words).out)
    assert {layer["hot_neurons"] for layer in plan["layers"]} == {512}
    found = {each["what"]: each["bytes"] for each in plan["memory"] if each["device"] == "accelerator"}
    compile_for_test(files / "usual.gguf", tmp_path / "artifact", target="4090", context=32, chunk=16)
    report = json.loads((tmp_path / "artifact" / "report.json").read_text())
    written = sum(size for name, size in report["weight_bytes"].items() if ".mlp." in name)
    assert written <= found["hot neurons"] < 1.01 * written


def test_a_plan_of_a_plain_file_has_no_numbers_to_count(cli: Cli, files: Path) -> None:
    words = ("--firing", "100%", "--target", "4090", "--quant", "stored")
    assert_refused(cli("plan", files / "plain.gguf", *words), 2, "quant stored given, but the checkpoint is not quant")
    assert_refused(cli("plan", "--shape", "llama-7b", *words), 2, "--quant stored applies to a quantized model")


@pytest.mark.slow("compiles a model twice")
def test_activations_of_eight_bits_and_other_formats_are_further_off(cli: Cli, files: Path, tmp_path: Path) -> None:
    expected = eager_logits(loaded(open_gguf(files / "some.gguf")), IDS)[PROMPT - 1 :]
    for number, options in enumerate((("--quant", "stored", "--activation-bits", 8), ("--quant", "q8"))):
        ended = cli("compile", files / "some.gguf", "-o", tmp_path / str(number), *SMALL, *options)
        assert ended.code == 0, ended.err
        assert 4e-3 < relative_error(logits_of(tmp_path / str(number)), expected) < 4e-2
        assert ("q2_k" in weight_formats(tmp_path / str(number)).values()) == (number == 0)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("some", ("--quant", "q4_k"), "q4_k is a format of quantized checkpoints alone, which keep it with --quant st"),
        ("plain", ("--quant", "stored"), "quant stored given, but the checkpoint is not quantized"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_a_line(
    cli: Cli, files: Path, tmp_path: Path, name: str, options: tuple[str, ...], said: str
) -> None:
    ended = cli("compile", files / f"{name}.gguf", "-o", tmp_path / "artifact", *options)
    assert_refused(ended, 2, said)
    assert list(tmp_path.iterdir()) == []


# ---- which matrices can be kept ----

SHAPE = GraphShape(hidden=64, heads=4, kv_heads=2, ffn=96, vocab=112, activation="silu")


class Stored:
    """Weights that say what format their matrices have."""

    def __init__(self, formats: Mapping[str, str | None]) -> None:
        self.formats = formats

    def stored(self) -> Mapping[str, str | None]:
        return self.formats


def chosen(graph_module: GraphModule, weights: object) -> tuple[dict[str, str], dict[str, int]]:
    """Return the formats of matrices, without the part of names that all have, and how many are rounded to which."""
    choice = choose_stored(cast(Captured, SimpleNamespace(weights=weights)), graph_module)
    formats = {name.removeprefix("model.").removesuffix(".weight"): form for name, form in choice.formats.items()}
    return formats, dict(choice.rounded)


def graph(kind: str = "none", **changes: Any) -> GraphModule:
    return InsertPredictors(kind)(build(replace(SHAPE, **changes))).graph_module


def matrices(graph_module: GraphModule, form: str | None) -> dict[str, str | None]:
    tensors = random_weights(graph_module).tensors
    return {name: form for name, tensor in tensors.items() if tensor.dim() == 2 and "predictors" not in name}


def block(layer: int) -> set[str]:
    return {f"layers.{layer}.mlp.{name}_proj" for name in ("gate", "up", "down")}


@pytest.mark.parametrize("form", ["q4_k", "q8"])
def test_every_matrix_keeps_its_numbers_where_all_neurons_are_computed(form: str) -> None:
    graph_module = graph()
    formats, rounded = chosen(graph_module, Stored(matrices(graph_module, form)))
    assert set(formats.values()) == {form}
    assert len(formats) == 2 + 2 * 7
    assert rounded == {}


@pytest.mark.parametrize("kind", ["exact", "sign"])
def test_neurons_that_are_read_alone_are_rounded(kind: str) -> None:
    graph_module = graph(kind, activation="relu")
    formats, rounded = chosen(graph_module, Stored(matrices(graph_module, "q6_k")))
    assert {name for name, form in formats.items() if form == "q8"} == block(0) | block(1)
    assert rounded == {"q8": 6}
    assert set(formats.values()) == {"q8", "q6_k"}


@pytest.mark.parametrize(
    ("changes", "lost"), [({"vocab": 113}, {"embed", "lm_head"}), ({"ffn": 90}, block(0) | block(1))]
)
def test_rows_that_make_no_panels_are_rounded(changes: dict[str, int], lost: set[str]) -> None:
    graph_module = graph(**changes)
    formats, rounded = chosen(graph_module, Stored(matrices(graph_module, "q4_k")))
    assert {name for name, form in formats.items() if form == "q8"} == lost
    assert rounded == {"q8": len(lost)}
    # Rows of q8 are read alone, but down of a block has to be packed by neurons.
    formats, rounded = chosen(graph_module, Stored(matrices(graph_module, "q8")))
    assert set(formats.values()) == {"q8"}
    assert rounded == ({"q8": 2} if "ffn" in changes else {})


def test_a_matrix_that_one_node_cannot_read_is_rounded_for_all() -> None:
    """Keys are some rows of the matrix of queries, and make no panels."""
    graph_module = graph(hidden=96, kv_heads=1)
    queries, keys = list(calls(graph_module.graph, LINEAR))[:2]
    rewriter = Rewriter(graph_module, "test")
    rows = rewriter.constant("rows", torch.arange(24))
    keys.update_arg(1, rewriter.call(INDEX_SELECT, (queries.args[1], 0, rows), before=keys, sources=()))
    formats, rounded = chosen(graph_module, Stored(matrices(graph_module, "q4_k")))
    others = {"layers.0.v_proj", "layers.1.k_proj", "layers.1.v_proj"}
    assert {name for name, form in formats.items() if form == "q8"} == {"layers.0.q_proj", *others}
    assert rounded == {"q8": 4}
    assert formats["layers.1.q_proj"] == "q4_k"


def test_what_lies_beside_a_plain_matrix_of_a_block_is_float16() -> None:
    graph_module = graph()
    stored = matrices(graph_module, "q4_k")
    del stored["model.layers.1.mlp.up_proj.weight"]
    stored["model.layers.0.q_proj.weight"] = None
    formats, rounded = chosen(graph_module, Stored(stored))
    assert formats["layers.0.q_proj"] == "q8"
    assert {name for name, form in formats.items() if form == "f16"} == block(1) - {"layers.1.mlp.up_proj"}
    assert rounded == {"f16": 2, "q8": 1}


def test_a_hot_block_keeps_its_numbers_where_up_is_half_of_a_matrix() -> None:
    """A fused gate and up, as Phi-3 has them, make no parts of a block; a partition does."""
    for hot, rounded in ((range(96), {}), (range(48), {"q8": 3})):
        whole = graph()
        block = next(calls(whole.graph, SPARSE_FFN))
        rewriter = Rewriter(whole, "test")
        rows = rewriter.constant("rows", torch.arange(96))
        half = rewriter.call(INDEX_SELECT, (arguments(block)["up"], 0, rows), before=block, sources=(block,))
        rewriter.set_argument(block, "up", half)
        parted = Partition({0: hot})(whole).graph_module
        stored = Stored(matrices(parted, "q4_k"))
        choice = choose_stored(cast(Captured, SimpleNamespace(weights=stored)), parted, hot_by_outputs=True)
        assert dict(choice.rounded) == rounded


def test_limits_of_neurons_hide_no_stored_numbers() -> None:
    """Limits and predictors lie over a model's weights, which say what they have as before."""
    graph_module = graph()
    base = Stored(matrices(graph_module, "q5"))
    weights = OverlayWeights(
        cast(Any, base), {"predictors.layers.0.output_limits": (96,)}, lambda name: torch.zeros(96)
    )
    assert chosen(graph_module, weights) == chosen(graph_module, base)
