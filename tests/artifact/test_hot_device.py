"""Code for GPUs without a GPU: what is compiled for every row, its instructions, and what the gate reads with."""

import functools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_artifacts import gpu_artifact, gpu_model
from helpers.ptx.sass import disassemble
from helpers.report_plans import random_plan
from helpers.weight_formats import ROW_FORMATS
from picompile.artifact.code import AcceleratorTarget, accelerator_target
from picompile.compile import compile_model
from picompile.compile.passes import pipeline_passes, run_passes
from picompile.config import CompileOptions, resolve
from picompile.errors import AccuracyError, UsageError
from picompile.frontend.hf import load_model
from picompile.machine.targets import TARGETS
from picompile.progress import NoProgress
from picompile_codegen import cuda
from picompile_codegen.cuda.build import FILES, build_cuda
from picompile_codegen.cuda.function import CudaKernel
from picompile_codegen.lowering.function import LowerOptions
from picompile_codegen.lowering.lower import lower
from picompile_codegen.lowering.placement import Placement
from picompile_codegen.specs import AttentionSpec, FfnSpec, LinearSpec
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.passes.partition import Partition
from test_prediction import held_out, write_predictors

__all__ = ["gpu_artifact", "gpu_model", "held_out"]

ROWS = {row.name: row.architecture for row in TARGETS.values() if row.back_end}
RANK = 24
# Of all kernels, which take ten seconds an architecture, those that are most unlike each other.
FEW = r"linear_\w+_300x96_r\d+|receive_96_r1|ffn_\w+_r1_\w+|attention_\w+_r16_\w+"
# What reads weights where one token is decoded.
DECODING = r"(linear|ffn|predict)_\w+(_r1_\w+|_r1|96)"
WEIGHTS = ("_data", "_scale", "signs")
BLOCK = functools.partial(
    FfnSpec, gated=True, activation="relu", up_activation="identity", gate_bias=False, up_bias=False, down_bias=False
)


def test_every_gpu_of_the_table_is_compiled_for() -> None:
    assert {name: accelerator_target(CompileOptions(target=name).back_end, name) for name in ROWS} == {
        name: AcceleratorTarget("cuda", architecture) for name, architecture in ROWS.items()
    }
    assert {*ROWS.values()} == {f"sm_{sm}" for sm in (75, 80, 86, 89, 90, 120)}


@functools.cache
def kernels(model: Path, quant: str, predictor: str) -> tuple[CudaKernel, ...]:
    """Return the kernels of a model half of whose neurons are hot."""
    captured = load_model(model)
    options = CompileOptions(target="4090", quant=quant)
    insert = InsertPredictors(predictor, ranks={0: RANK} if predictor == "learned" else {})
    passes = [
        Partition({0: range(0, 200, 2)}) if isinstance(own, Partition) else own
        for own in pipeline_passes(options, insert)
    ]
    graph_module = run_passes(captured, passes, NoProgress())
    lowered = lower(graph_module, LowerOptions(32, 16, "float16", 1, "cuda", Placement.all_of(1)))
    return tuple(lowered.accelerator_built.values())


def named(pattern: str, kernels: Iterable[CudaKernel]) -> list[CudaKernel]:
    return [kernel for kernel in kernels if re.fullmatch(pattern, kernel.name)]


@pytest.mark.slow("compiles with NVRTC; the kernels of one artifact are fast")
@pytest.mark.parametrize("sm", sorted({int(each.removeprefix("sm_")) for each in ROWS.values()} - {89}))
def test_kernels_compile_for_every_architecture(gpu_model: Path, tmp_path: Path, sm: int) -> None:
    few = named(FEW, kernels(gpu_model, "q4", "exact"))
    assert [kernel.name.partition("_")[0] for kernel in few] == ["receive", "ffn", "linear", "attention", "linear"]
    built(few, tmp_path, sm)
    assert json.loads((tmp_path / "device.json").read_text())["sm"] == sm
    assert f".target sm_{sm}\n".encode() in (tmp_path / "device.ptx").read_bytes()


def built(kernels: Iterable[CudaKernel], folder: Path, sm: int) -> dict[str, str]:
    """Compile kernels, and return their machine code by symbol."""
    build_cuda(list(kernels), folder, sm)
    check_resources(folder)
    return disassemble(folder / "device.cubin")


def check_resources(folder: Path) -> None:
    """A thread's memory beside registers is for what is spilled or indexed at run time; kernels have neither."""
    launches = json.loads((folder / "device.json").read_text())["kernels"]
    for launch in (launch for each in launches.values() for launch in each):
        assert launch["local_bytes"] == 0, launch["symbol"]
        assert 0 < launch["registers"] <= 255
        # What a block has without asking for more.
        assert launch["shared_bytes"] <= 48 * 1024, launch["symbol"]


# -------------------------------------------------------------------------------------------------------- instructions


def check_instructions(folder: Path) -> None:
    """Weights are read 16 bytes at a time, many at once, and nothing is spilled, says the machine code in `folder`."""
    found, source = disassemble(folder / "device.cubin"), (folder / "device.cu").read_text()
    definitions = re.findall(r"__global__[^\n]*?\s(\w+)\(([^)]*)\)\s*\{\n(.*?\n)\}\n", source, re.DOTALL)
    assert set(found) == {symbol for symbol, _, _ in definitions}
    reading = 0
    for symbol, parameters, body in definitions:
        text = found[symbol]
        assert not re.search(r"\b(LDL|STL)\b", text), f"{symbol} spills"
        if any(name.endswith(WEIGHTS) for name in re.findall(r"(\w+)_ptr\b", parameters)):
            reading += 1
            # On tensor cores a thread has a piece of each tile: of q4 it is 8 bytes.
            wide = r"\bLDG(STS\.E\.BYPASS\.128|\.E\.(64|128))\b" if "pi_mma(" in body else r"\bLDG\.E\.128\b"
            assert re.search(wide, text), f"{symbol} reads its weights in small pieces"
        if "pi_loads_first()" in body:
            check_loads_come_first(symbol, text)
    # At the least: a product, and gate, up and down of a block.
    assert reading >= 4


def check_loads_come_first(symbol: str, text: str) -> None:
    """Nothing has to do with what LDG.128 loads before the PMTRIG behind it, which is what `loads_first` becomes."""
    loading: set[int] = set()
    events = 0
    for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@!?U?P\w+ +)?(.*?) *;", text):
        operation, _, operands = instruction.partition(" ")
        loads = re.match(r"R(\d+), (.*)", operands) if operation.startswith("LDG.E.128") else None
        named = re.findall(r"\bR(\d+)\b", loads[2] if loads else operands)
        assert not loading & {int(number) for number in named}, f"{symbol}: {instruction}"
        if loads:
            loading |= set(range(int(loads[1]), int(loads[1]) + 4))
        if operation == "PMTRIG":
            loading, events = set(), events + 1
    assert events and not loading, f"{symbol} loads without an event"


@pytest.mark.slow("compiles with NVRTC; the kernels of one artifact are fast")
@pytest.mark.parametrize("sm", [75, 89])
def test_loads_of_long_rows_come_first(tmp_path: Path, sm: int) -> None:
    """Those of a model have several turns of a warp, and are where registers are few: q4 has 32 weights a lane."""
    ffns = [BLOCK(format="q4", neurons=704, dim=4096, rows=1, kind=kind) for kind in ("exact", "masked")]
    linears = [LinearSpec(format="q4", n=64, k=k, rows=1, bias=False) for k in (420, 4096)]
    built(map(cuda.write_kernel, (*ffns, *linears)), tmp_path, sm)
    check_instructions(tmp_path)


@pytest.mark.slow("compiles with NVRTC")
@pytest.mark.parametrize("sm", [75, 80, 86, 89, 90, 120])
def test_prompts_are_multiplied_on_tensor_cores(tmp_path: Path, sm: int) -> None:
    """All of a step without a spill, and from sm_80 on copied to shared memory behind the multiplications' back."""
    block = BLOCK(kind="exact", format="q8", neurons=2048, dim=1024, rows=256)
    linears = [LinearSpec(format=form, n=8192, k=1024, rows=256, bias=False) for form in ROW_FORMATS]
    attention = AttentionSpec(
        heads=64, kv_heads=8, head_dim=128, value_dim=128, context=4096, rows=256, kv_dtype="float16", scale=0.1,
        mode="chunk", window=0, sequences=1,
    )  # fmt: skip
    found = built(map(cuda.write_kernel, (block, attention, *linears)), tmp_path, sm)
    multiplying = {name: text for name, text in found.items() if "HMMA" in text}
    assert len(multiplying) == len(linears) + 3
    for name, text in multiplying.items():
        assert not re.search(r"\b(LDL|STL)\b", text), f"{name} spills"
        # Keys and values may be bytes; they come by way of registers.
        assert ("LDGSTS" in text) == (sm >= 80 and not name.startswith("attention")), name
        assert "LDSM" in text, name


@pytest.mark.slow("disassembles all kernels of an artifact")
def test_all_kernels_of_an_artifact_for_sm_89(gpu_artifact: Path) -> None:
    check_instructions(gpu_artifact / "kernels")
    check_resources(gpu_artifact / "kernels")


@pytest.mark.slow("compiles with NVRTC; the kernels of one artifact are fast")
@pytest.mark.parametrize(("quant", "predictor"), [("q4", "learned"), ("q8", "sign")])
def test_kernels_of_other_formats_and_predictors(gpu_model: Path, tmp_path: Path, quant: str, predictor: str) -> None:
    reading = named(DECODING, kernels(gpu_model, quant, predictor))
    assert {kernel.name.partition("_")[0] for kernel in reading} == {"linear", "ffn", "predict"}
    built(reading, tmp_path, 89)
    check_instructions(tmp_path)


@pytest.mark.slow("compiles with NVRTC; the kernels of one artifact are fast")
@pytest.mark.parametrize("sm", [75, 89])
def test_attention_takes_no_memory_beside_registers(tmp_path: Path, sm: int) -> None:
    """With soft cap, slopes and sinks, in one token, several sequences and a chunk; weights are computed once."""
    build = functools.partial(AttentionSpec, heads=8, kv_heads=2, value_dim=64, scale=0.125)
    plain = functools.partial(build, head_dim=64, kv_dtype="float16", window=0, sequences=1, context=256)
    every = functools.partial(
        build, head_dim=128, kv_dtype="q8", window=300, sequences=3, softcap=50.0, slopes=True, sinks=True, context=600,
    )  # fmt: skip
    one, chunk = (cuda.write_kernel(plain(rows=rows, mode=mode)) for rows, mode in ((1, "one"), (16, "chunk")))
    specs = [every(rows=1, mode="one", extend=True), every(rows=3, mode="sequences"), every(rows=16, mode="chunk")]
    found = built([one, chunk, *map(cuda.write_kernel, specs)], tmp_path, sm)
    exps = {kernel.name: found[f"{kernel.name}_kernel"].count("MUFU.EX2") for kernel in (one, chunk)}
    # A thread has 8 of a tile where a token is decoded, 16 in a chunk; and what all before is multiplied by.
    assert sm < 80 or exps == {one.name: 8 + 1, chunk.name: 16 + 1}


# ------------------------------------------------------------------------------------------------------------ the gate


def lossy(model: Path, folder: Path, text: Path, **changes: object) -> CompileOptions:
    options: dict[str, Any] = {
        "quant": "f16",
        "context": 32,
        "predictor": "learned",
        "predictors": write_predictors(model, folder / "predictors", bias=0.0),
        "calibration": (text,),
        "hot": {0: range(1, 200, 3)},
        "accuracy_bound": math.inf,
        "check_tokens": 60,
    }
    return CompileOptions(**{**options, **changes})


@pytest.fixture
def no_gpu_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate does not read it, and it takes long to make."""

    def build(kernels: object, folder: Path, sm: int) -> dict[str, str]:
        for name in FILES.values():
            (folder / name).write_text("no code")
        return FILES

    monkeypatch.setattr("picompile_codegen.cuda.build.build_cuda", build)


def accuracy_of(artifact: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((artifact / "report.json").read_text())["accuracy"]
    return found


@pytest.mark.slow("compiles and measures a model")
def test_the_accuracy_check_reads_without_the_gpu(
    gpu_model: Path, held_out: Path, tmp_path: Path, no_gpu_code: None
) -> None:
    """The figures are those of the same model for processors, and nothing stays of what they were found with."""
    compile_model(gpu_model, tmp_path / "host", lossy(gpu_model, tmp_path, held_out))
    compile_model(gpu_model, tmp_path / "gpu", lossy(gpu_model, tmp_path, held_out, target="4090"))
    assert accuracy_of(tmp_path / "gpu") == accuracy_of(tmp_path / "host")
    assert abs(accuracy_of(tmp_path / "gpu")["relative_change"]) > 1e-5, "half of the neurons are left out for nothing"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu", "host", "predictors"]
    assert {path.name for path in (tmp_path / "gpu" / "kernels").iterdir()} == {
        "host.so", "device.cubin", "device.ptx", "device.json"
    }  # fmt: skip
    program = json.loads((tmp_path / "gpu" / "program.json").read_text())
    assert any(call.get("device") == "accelerator" for call in program["functions"]["decode"])
    read = json.loads((tmp_path / "gpu" / "manifest.json").read_text())
    assert read["accelerator"]["sm"] == 89
    assert read["accuracy"]["relative_change"] == accuracy_of(tmp_path / "gpu")["relative_change"]
    # A bound that is not met leaves nothing.
    with pytest.raises(AccuracyError, match="the predictors raise the perplexity"):
        compile_model(
            gpu_model, tmp_path / "other", lossy(gpu_model, tmp_path, held_out, target="4090", accuracy_bound=1e-9)
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu", "host", "predictors"]


@pytest.mark.slow("compiles and measures a model")
def test_a_partition_of_the_cpu_is_judged_by_itself(
    gpu_model: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("picompile.compile.accuracy.native_code", lambda file: pytest.fail("another program was made"))
    compile_model(gpu_model, tmp_path / "both", lossy(gpu_model, tmp_path, held_out, accelerator="cpu"))
    compile_model(gpu_model, tmp_path / "host", lossy(gpu_model, tmp_path, held_out))
    found, expected = accuracy_of(tmp_path / "both"), accuracy_of(tmp_path / "host")
    # Programs with an accelerator read token by token, others in chunks with masks: sums come in another order.
    for name in ("perplexity", "dense_perplexity"):
        assert found[name] == pytest.approx(expected[name], rel=1e-5)
    assert found["layers"] == expected["layers"]


def test_a_machine_that_no_code_runs_on_is_told_first(
    gpu_model: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from picompile_runtime import MachineError
    from picompile_runtime.devices import machine

    monkeypatch.setattr(machine, "cpu_features", lambda: frozenset())
    monkeypatch.setattr(
        "picompile.compile.driver.load_model", lambda model, activation: pytest.fail("the model was captured")
    )
    with pytest.raises(MachineError, match="no code can be made for this machine's processor"):
        compile_model(gpu_model, tmp_path / "gpu", lossy(gpu_model, tmp_path, held_out, target="4090"))


# ------------------------------------------------------------------------------------------------------------ the plan


@pytest.mark.slow("compiles a model for a GPU")
@pytest.mark.parametrize(("form", "row_bytes"), [("q4", (64, 64)), ("auto", (192, 64))])
def test_learned_predictors_are_in_the_plan(
    gpu_model: Path, held_out: Path, tmp_path: Path, form: str, row_bytes: tuple[int, int]
) -> None:
    """With the sizes that they have in their format; whether all fits is asked with them."""
    options = lossy(gpu_model, tmp_path, held_out, target="4090", accelerator="cpu", hot=None, predictor_quant=form)
    compile_model(gpu_model, tmp_path / "artifact", options)
    report = json.loads((tmp_path / "artifact" / "report.json").read_text())
    formats = report["weight_formats"]
    own = "f16" if form == "auto" else form
    assert {each for name, each in formats.items() if name.startswith("predictors.")} == {own}
    assert "f16" in formats.values() and report["plan"]["predictor"] == "learned"
    (taken,) = (row["bytes"] for row in report["plan"]["memory"] if row["what"] == "predictors")
    # Rank 7: rows of 96 and of 7 elements, padded to 64 bytes; and the bias, float32.
    assert taken == 7 * row_bytes[0] + 200 * row_bytes[1] + 832
    assert [layer["hot_neurons"] for layer in report["plan"]["layers"]] == [200]


@pytest.mark.parametrize(
    ("planned", "given", "expected"), [("q4", None, "q4"), ("q4", "q6", "q6"), (None, None, "auto")]
)
def test_the_format_of_predictors_is_the_planned_one(
    gpu_model: Path, planned: str | None, given: str | None, expected: str
) -> None:
    made = random_plan(3)
    layers = tuple(replace(layer, hot=()) for layer in made.layers)
    plan = None if planned is None else replace(made, layers=layers, predictor_quant=planned)
    options = CompileOptions(target="4090", plan=plan, predictor_quant=given)
    assert resolve(options, load_model(gpu_model).facts).predictor_quant == expected


def test_a_module_in_memory_has_no_profile(gpu_model: Path, tmp_path: Path) -> None:
    options = CompileOptions(target="4090", context=32, accelerator="cpu", vram_budget="300kB", host_bandwidth="0.02")
    with pytest.raises(UsageError, match="a module in memory has no profile"):
        compile_model(load_model(gpu_model), tmp_path / "artifact", options)
    assert list(tmp_path.iterdir()) == []
