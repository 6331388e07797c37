"""Artifacts for GPUs on the command line: their plan, what is shown of them, and how they end where they cannot run."""

import ctypes
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.gpu_artifacts import fake_cuda, fake_library, gpu, gpu_artifact, gpu_kernels, gpu_model, host_artifact
from helpers.products import sampled
from helpers.refusals import assert_refused
from helpers.support import Cli
from picompile.placement.plan_file import read_plan
from picompile_runtime.artifact import weights as resident
from picompile_runtime.devices.cuda import CudaAccelerator, driver
from picompile_runtime.engine import layout as device_memory

__all__ = ["fake_cuda", "fake_library", "gpu", "gpu_artifact", "gpu_kernels", "gpu_model", "host_artifact"]

# The same schedule on two partitions of the CPU: the plan is the GPU's, and what it comes to can be run.
FOR_4090 = ("--target", "4090", "--accelerator", "cpu", "--quant", "f16", "--context", "32")
# A host so slow that the GPU is worth it for a tiny model, and a GPU so small that not all of it fits.
SMALL = ("--vram-budget", "800kB", "--host-bandwidth", "0.02")
IDS = "1,15,7,200,31"


@pytest.fixture
def nothing_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "picompile.predictors.profile.run.profile_model", lambda *_: pytest.fail("the model was profiled")
    )


def tokens(cli: Cli, artifact: Path) -> list[int]:
    ended = cli("run", artifact, "--ids", IDS, "-n", "8", "-t", "1", "--json")
    assert (ended.code, ended.err) == (0, "")
    return list(json.loads(ended.out)["tokens"])


def without_neurons(plan: Path) -> dict[str, Any]:
    """Return a plan's content as a report has it: without the hot neurons."""
    content: dict[str, Any] = json.loads(plan.read_text())
    for layer in content["layers"]:
        del layer["hot"]
    return content


# ------------------------------------------------------------------------------------------------------------ the plan


@pytest.mark.slow("compiles a model for a GPU")
@pytest.mark.parametrize("where", ["given", "in the work folder"])
def test_the_plan_is_that_of_the_same_options(
    cli: Cli, tiny_model: Path, tiny_profile: Path, tmp_path: Path, where: str, nothing_profiled: None
) -> None:
    """And the artifact gives the tokens of the one that is compiled with the plan's file, and of the CPU's."""
    work, plan = tmp_path / "work", tmp_path / "plan.json"
    shutil.copytree(tiny_profile, work / "profile")
    profile = ("--profile", tiny_profile) if where == "given" else ("--work", work)
    words = ("--quant", "f16", "--context", "32", "--predictor", "exact", *SMALL)
    assert cli("plan", tiny_model, "--target", "4090", *words, *profile, "-o", plan).code == 0
    hot = [layer.hot_neurons for layer in read_plan(plan).layers]
    assert any(0 < count < 200 for count in hot)
    assert cli("compile", tiny_model, "-o", tmp_path / "made", *FOR_4090, *SMALL, *profile).code == 0
    made = json.loads((tmp_path / "made" / "report.json").read_text())
    assert made["plan"] == without_neurons(plan)
    parts = {(part["layer"], part["part"]): part["neurons"] for part in made["ffn"]}
    assert [parts.get((layer, "hot"), 0) for layer in (0, 1)] == hot
    assert cli("compile", tiny_model, "-o", tmp_path / "given", *FOR_4090, "--plan", plan).code == 0
    for name in ("program.json", "weights.safetensors", "report.json"):
        assert (tmp_path / "given" / name).read_bytes() == (tmp_path / "made" / name).read_bytes()
    assert cli("compile", tiny_model, "-o", tmp_path / "host", "--quant", "f16", "--context", "32").code == 0
    assert tokens(cli, tmp_path / "made") == tokens(cli, tmp_path / "host")


@pytest.mark.slow("compiles a model for a GPU")
def test_nothing_is_profiled_if_the_model_fits_the_gpu(
    cli: Cli, tiny_model: Path, tmp_path: Path, nothing_profiled: None
) -> None:
    ended = cli("compile", tiny_model, "-o", tmp_path / "artifact", *FOR_4090, "--vram-budget", "80%")
    assert (ended.code, ended.err) == (0, "")
    plan = json.loads((tmp_path / "artifact" / "report.json").read_text())["plan"]
    assert plan["accelerator_budget_bytes"] == int(24 * 2**30 * 0.96 * 0.8)
    assert plan["predictor"] == "exact"
    assert plan["firing"] == "no profile, every neuron counted as firing"
    for layer in plan["layers"]:
        assert (layer["hot_neurons"], layer["attention"], layer["kv_cache"]) == (200, "accelerator", "accelerator")
    facts = json.loads(cli("inspect", tmp_path / "artifact", "--json").out)
    assert set(facts["parts"]) == {"hot"}
    # All but the embedding is on the device.
    memory, used = facts["accelerator"]["memory_bytes"], 300 * 192
    assert (memory["host"]["weights"], memory["host"]["kv_cache"]) == (used, 0)
    assert memory["accelerator"]["weights"] <= sum(
        row["bytes"] for row in plan["memory"] if row["device"] == "accelerator"
    )


@pytest.mark.slow("compiles a model for a GPU")
def test_a_profile_is_made_where_it_is_needed(
    cli: Cli, tiny_model: Path, tiny_profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile is made of the given text; without a work folder it is short, and nothing of it stays."""
    from picompile.predictors.profile.profile import load_profile

    asked = []

    def profile_model(model: Path, output: Path, options: Any, progress: Any) -> Any:
        asked.append((model, options.calibration, options.tokens, options.samples))
        shutil.copytree(tiny_profile, output)
        return load_profile(output)

    monkeypatch.setattr("picompile.predictors.profile.run.profile_model", profile_model)
    text = tmp_path / "text.txt"
    text.write_text("def f(x): return x")
    words = (*FOR_4090, *SMALL, "--calibration", text)
    assert cli("compile", tiny_model, "-o", tmp_path / "artifact", *words).code == 0
    assert asked.pop() == (tiny_model, (text,), 16_384, 1)
    plan = json.loads((tmp_path / "artifact" / "report.json").read_text())["plan"]
    assert plan["firing"] == "a profile made for this plan"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "text.txt"]
    # What is kept is one that predictors can be trained on.
    assert cli("compile", tiny_model, "-o", tmp_path / "other", *words, "--work", tmp_path / "work").code == 0
    assert asked.pop() == (tiny_model, (text,), 65_536, 32_768)
    assert asked == []


def test_a_model_that_fits_nowhere_is_refused_before_profiling(
    cli: Cli, tiny_model: Path, tmp_path: Path, nothing_profiled: None
) -> None:
    words = (*FOR_4090, "--vram-budget", "10kB", "--host-memory", "10kB")
    ended = cli("compile", tiny_model, "-o", tmp_path / "new" / "artifact", *words)
    assert (ended.code, ended.out, ended.err.count("\n")) == (5, "", 1)
    assert "does not fit" in ended.err and "it would with --host-memory" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_bad_input_is_told_before_the_model_is_captured(
    cli: Cli, gpu_model: Path, tiny_profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "picompile.compile.driver.load_model", lambda model, activation: pytest.fail("the model was captured")
    )
    hot = tmp_path / "hot.json"
    hot.write_text('{"0": [1]}')
    for words, message in (
        (("cpu", "--vram-budget", "1GiB"), "--vram-budget: target cpu has no GPU"),
        (("4080,4090",), "an artifact is for one GPU"),
        (("4090", "--vram-budget", "101%"), "--vram-budget: '101%' is no share"),
        (("4090", "--host-memory", "half"), "--host-memory: 'half' is no size"),
        (("4090", "--host-bandwidth", "0"), "--host-bandwidth"),
        (("4090", "--hot", hot, "--vram-budget", "1GiB"), "--vram-budget: --hot or --plan says"),
        (("4090", "--hot", hot, "--profile", tiny_profile), "profile given, but predictor auto needs none"),
        (("4090", "--profile", tiny_profile), "is a profile of another model"),
        (("cpu", "--accelerator", "cuda"), "accelerator cuda needs a target with a GPU"),
    ):
        assert_refused(cli("compile", gpu_model, "-o", tmp_path / "artifact", "--target", *words), 2, message)
        assert list(tmp_path.iterdir()) == [hot]


def test_without_nvrtc(cli: Cli, gpu_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(
        "picompile.compile.driver.load_model", lambda model, activation: pytest.fail("the model was captured")
    )
    says = "NVRTC, which is not installed: pip install 'cuda-bindings>=12.8,<13'"
    assert_refused(cli("compile", gpu_model, "-o", tmp_path / "artifact", "--target", "4090"), 6, says)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------- inspect and verify


def test_inspect_shows_memory_and_kernel_resources(cli: Cli, gpu_artifact: Path) -> None:
    facts = json.loads(cli("inspect", gpu_artifact, "--json").out)
    device, memory = facts["accelerator"], facts["accelerator"]["memory_bytes"]
    assert (device["kind"], device["sm"], device["code"]) == ("cuda", 89, [])
    program = json.loads((gpu_artifact / "program.json").read_text())
    arenas = {"accelerator": "accelerator_arena_bytes", "host": "arena_bytes", "shared": "shared_arena_bytes"}
    assert {name: part["workspace"] for name, part in memory.items()} == {
        name: program[key] for name, key in arenas.items()
    }
    # Two kv heads of 24 elements in f16, and as much for values.
    assert memory["accelerator"]["kv_cache"] == facts["memory_bytes"]["kv_cache"] == 2 * 2 * 24 * 32 * 2
    assert memory["shared"]["weights"] == 0
    launches = json.loads((gpu_artifact / "kernels" / "device.json").read_text())["kernels"].values()
    keys = ("symbol", "registers", "local_bytes", "shared_bytes", "grid", "block")
    expected = [[launch[key] for key in keys] for each in launches for launch in each]
    assert [[kernel[key] for key in keys] for kernel in device["kernels"]] == expected
    text = cli("inspect", gpu_artifact).out
    assert "GPU of compute capability 8.9" in text
    lines = {line.split()[0]: line.split()[-3:] for line in text.splitlines() if "_kernel" in line}
    assert lines[expected[0][0]] == [str(value) for value in expected[0][1:4]]


# ----------------------------------------------------------------------------------------------------------------- run


@pytest.mark.parametrize(("sm", "image"), [("89", 1), ("90", 2)], ids=["the cubin", "the PTX of newer GPUs"])
def test_runs_on_the_gpu_it_is_for(
    cli: Cli,
    gpu_artifact: Path,
    host_artifact: Path,
    gpu: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    sm: str,
    image: int,
) -> None:
    monkeypatch.setenv("FAKE_CUDA_SM", sm)
    found = tokens(cli, gpu_artifact)
    assert gpu.fake_image() == image
    assert found == tokens(cli, host_artifact)


READING = {"run": ("--ids", IDS), "bench": ("-p", "4", "-n", "4", "-r", "1"), "eval": ("--text", __file__, "-n", "8")}


@sampled(
    slow="each command meets each GPU",
    command=READING,
    ended=(
        ("DEVICES=0", 6, "the NVIDIA driver has no device"),
        ("DEVICES=-1", 6, "cuInit: CUDA_ERROR_NO_DEVICE"),
        ("SM=86", 6, "GPUs of compute capability 8.9 and newer, and Stand-in 4090 has 8.6; compile the model for"),
        # What drivers answer that are too old: no kernel image, an unknown version of PTX, or of the cubin's format.
        ("REFUSE=209", 6, "the NVIDIA driver, of CUDA 12.4, refuses the artifact's code"),
        ("REFUSE=222", 6, "install a newer driver"),
        ("REFUSE=200", 6, "install a newer driver"),
        ("MEMORY=200000", 5, "are free; close what uses the GPU, leave weights with the host (--replan)"),
    ),
)
def test_a_gpu_that_cannot_run_the_artifact_is_one_error_line(
    cli: Cli,
    gpu_artifact: Path,
    gpu: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    ended: tuple[str, int, str],
    command: str,
) -> None:
    setting, code, says = ended
    monkeypatch.setenv(*f"FAKE_CUDA_{setting}".split("="))
    assert_refused(cli(command, gpu_artifact, *READING[command]), code, says)


@pytest.fixture
def least_bytes(cli: Cli, gpu_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Bytes that a GPU needs without weights, and those of weights; no memory is spared, and pieces are of a byte."""
    monkeypatch.setattr(device_memory, "_SPARED_BYTES", 0)
    monkeypatch.setattr(device_memory, "_PIECE_BYTES", 1)  # the model is smaller than any piece
    monkeypatch.setattr(CudaAccelerator, "graph_bytes", lambda self, kernels: 0)
    memory = json.loads(cli("inspect", gpu_artifact, "--json").out)["accelerator"]["memory_bytes"]["accelerator"]
    return memory["kv_cache"] + memory["workspace"], memory["weights"]


def leave_free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    """The stand-in says that a sixteenth is in use."""
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(-(-free_bytes * 16 // 15)))


@pytest.mark.slow("tries three commands; one is fast", but=("run",))
@pytest.mark.parametrize("command", READING)
def test_with_less_memory_than_planned_weights_stay_with_the_host(
    cli: Cli,
    gpu_artifact: Path,
    host_artifact: Path,
    gpu: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    least_bytes: tuple[int, int],
    command: str,
) -> None:
    """With --replan, and with the same result; a byte less than that needs is refused."""
    least, weights = least_bytes
    words = (command, gpu_artifact, *READING[command], *(("-n", "8") if command == "run" else ()), "--json")
    leave_free(monkeypatch, least + weights - 60)
    ended = cli(*words)
    assert (ended.code, ended.err.count("\n")) == (5, 1)
    leave_free(monkeypatch, least + 60)
    ended = cli(*words, "--replan")
    assert ended.code == 0
    assert "GiB of weights that were planned for the GPU stay with the host" in ended.err
    if command == "run":
        assert json.loads(ended.out)["tokens"] == tokens(cli, host_artifact)
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(least))
    assert_refused(cli(*words, "--replan"), 5, "even if its weights stay with the host")


@pytest.mark.parametrize("why", ["as asked", "little memory"])
def test_streamed_weights_are_in_memory_that_can_be_pinned(
    cli: Cli, gpu_artifact: Path, host_artifact: Path, gpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """A file that is mapped cannot, so that it is copied even where weights else stay in it."""
    assert json.loads((gpu_artifact / "program.json").read_text())["streamed"]
    if why == "as asked":
        monkeypatch.setenv("PICOMPILE_MMAP", "1")
    else:
        monkeypatch.setattr(resident, "_MARGIN_BYTES", 2**60)
    assert tokens(cli, gpu_artifact) == tokens(cli, host_artifact)
    monkeypatch.setattr(resident, "_free_bytes", lambda: 1000)
    says = "the weights that the GPU reads from the host's memory take 0.1 MiB"
    assert_refused(cli("run", gpu_artifact, "--ids", IDS), 5, says)


def test_streamed_weights_in_memory_that_cannot_be_pinned(
    cli: Cli,
    gpu_artifact: Path,
    host_artifact: Path,
    gpu: ctypes.CDLL,
    monkeypatch: pytest.MonkeyPatch,
    least_bytes: tuple[int, int],
) -> None:
    """The tokens are those of pinned memory, and a line says what is slower; kernels that read them are an error."""
    monkeypatch.setenv("FAKE_CUDA_NO_PINNING", "2")
    ended = cli("run", gpu_artifact, "--ids", IDS, "-n", "8", "--json")
    assert ended.code == 0 and json.loads(ended.out)["tokens"] == tokens(cli, host_artifact)
    assert ended.err.count("the system cannot pin the 0.00 GiB") == 1
    assert gpu.fake_count(b"cuLaunchHostFunc") > 0
    leave_free(monkeypatch, least_bytes[0] + 60)
    says = "weights that the GPU reads from the host for prompts: the system cannot pin"
    assert_refused(cli("run", gpu_artifact, "--ids", IDS, "--replan"), 5, says)


def test_without_a_driver(cli: Cli, gpu_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libnone.so.1")
    assert cli("verify", gpu_artifact).code == 0
    ended = cli("run", gpu_artifact, "--ids", IDS)
    assert (ended.code, ended.out) == (6, "")
    assert ended.err == "error: no NVIDIA driver (libnone.so.1 cannot be loaded)\n"
