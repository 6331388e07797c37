"""Runs what NVRTC made of kernels without a GPU, in several orders of threads, and compares with float64.

`python tests/ptx_matrix.py PACK` does so with all kernels of a pack, and with a whole model.
"""

import ctypes
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.fake_cuda.fixtures import fake_cuda, fake_library
from helpers.gpu_packs import BENCHMARKS, gpu_pack
from helpers.kernels.emulator import ORDERS
from helpers.ptx.cases import CaseResult, emulate_ptx, run_in_orders
from helpers.ptx.device_code import DeviceCode, code_of_pack
from helpers.ptx.machine_code import later_registers, machine_faults, missing_later_ptxas, register_faults
from helpers.ptx.syntax import parse
from helpers.support import ROOT, BuildOnce

sys.path.insert(0, str(BENCHMARKS))

from _gpu_cases import Case, pack_kernels, small_cases
from _gpu_kernels import images_of

pytestmark = pytest.mark.slow("translates and runs the PTX of whole kernels; single instructions have fast tests")

__all__ = ["fake_cuda", "fake_library", "gpu_pack"]

# A kernel of each kind, and each format in one of those that have formats.
LABELS = (
    *("linear q6", "linear chunk q4m", "linear with norm q4", "embedding q8", "predictor q4m", "predictor by signs"),
    *("ffn masked q4", "ffn exact f16", "ffn dense q6", "ffn chunk q8", "ffn batch", "ffn without gate", "ffn part"),
    *("ffn part, shared q8", "ffn chunk, shared f16", "attention long q8", "attention float16"),
    *("attention chunk float16", "cache q8", "rms_norm", "layer_norm", "rotary", "add", "take_last", "join columns"),
    *("leading logits 5003", "send mask", "send mask, shared", "receive", "receive mask", "sum with norm, received"),
    *("borrow cache", "copy words", "send"),
)
SM = 90
# Of GPUs that have no asynchronous copies, and smaller products of matrices.
OLD_SM, OLD_LABELS = 75, ("linear chunk q4m", "ffn chunk q8", "attention chunk float16")


# Archives of the pack of helpers/gpu_packs.py without code for a GPU: the model for the CPU alone.
NO_GPU = 1


class Pack(NamedTuple):
    """One archive of kernels, and its cases by label."""

    folder: Path
    code: DeviceCode
    cases: dict[str, dict[str, Any]]


def _pack(folder: Path, labels: tuple[str, ...], sm: int) -> None:
    folder.mkdir()
    known: dict[str, Case] = {case.label: case for case in small_cases()}
    cases = pack_kernels([known[label] for label in labels], folder / "small.zip", sm)
    (folder / "pack.json").write_text(json.dumps(cases))
    (code,) = code_of_pack(folder)
    emulate_ptx(code.ptx, folder / "small.so")


def _read(folder: Path) -> Pack:
    (code,) = code_of_pack(folder)
    return Pack(folder, code, {case["label"]: case for case in json.loads((folder / "pack.json").read_text())})


@pytest.fixture(scope="module")
def pack(build_once: BuildOnce) -> Pack:
    return _read(build_once("ptx-kernels", lambda folder: _pack(folder, LABELS, SM)))


@pytest.fixture(scope="module")
def old_pack(build_once: BuildOnce) -> Pack:
    return _read(build_once("ptx-kernels-of-old-gpus", lambda folder: _pack(folder, OLD_LABELS, OLD_SM)))


def ran(pack: Pack, label: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> CaseResult:
    """Run a case on the stand-in, whose kernels are those of `library`."""
    for name, value in (("KERNELS", str(library)), ("SM", str(pack.code.sm)), ("VERSION", "12080")):
        monkeypatch.setenv(f"FAKE_CUDA_{name}", value)
    return run_in_orders(images_of(pack.folder, "small"), pack.cases[label], ORDERS)


@pytest.mark.parametrize("label", LABELS)
def test_a_kernel(label: str, pack: Pack, fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ran(pack, label, pack.folder / "small.so", monkeypatch).faults == ()


@pytest.mark.parametrize("label", OLD_LABELS)
def test_a_kernel_of_old_gpus(
    label: str, old_pack: Pack, fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ran(old_pack, label, old_pack.folder / "small.so", monkeypatch).faults == ()


def test_the_code_as_text(pack: Pack, old_pack: Pack) -> None:
    for code in (pack.code, old_pack.code):
        kernels = parse(code.ptx)
        assert (code.wrong_loads(kernels), machine_faults(code, kernels)) == ([], [])


def test_a_later_compiler_takes_few_more_registers(pack: Pack, old_pack: Pack) -> None:
    if reason := missing_later_ptxas():
        pytest.skip(reason)
    for code in (pack.code, old_pack.code):
        assert register_faults(later_registers(code)) == []


def ptx_of_case(pack: Pack, label: str) -> str:
    """The PTX of a case's launches, as a module."""
    launches = pack.code.description["kernels"][pack.cases[label]["kernel"]]
    starts = tuple(f"{launch['symbol']}(" for launch in launches)
    head, *entries = pack.code.ptx.split(".visible .entry ")
    return head + "".join(f".visible .entry {entry}" for entry in entries if entry.startswith(starts))


@pytest.mark.parametrize(
    ("label", "instruction", "other", "message"),
    [
        ("rms_norm", r"div\.rn\.f32", "mul.f32", "error"),
        ("rms_norm", r"(mov\.u32 \s*%r\d+), 16;", r"\1, 8;", "error"),
        ("rms_norm", r"(st\.shared\.f32[^;]*;\s+\S+:\s+)bar\.sync \s*0;", r"\1", "nothing orders the two"),
        ("add", r"setp\.lt\.s32( \s*%p\d+, %r\d+, 175;)", r"setp.le.s32\1", "nothing orders the two"),
        ("linear chunk q4m", r"m8n8\.x4\.shared", "m8n8.x4.trans.shared", "error"),
        ("cache q8", r"cvt\.rni\.f32\.f32", "abs.f32", "error"),
    ],
)
def test_one_changed_instruction_is_found(
    label: str,
    instruction: str,
    other: str,
    message: str,
    pack: Pack,
    fake_cuda: ctypes.CDLL,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = ptx_of_case(pack, label)
    planted = re.sub(instruction, other, right, count=1)
    assert planted != right
    faults = ran(pack, label, emulate_ptx(planted, tmp_path / "planted.so"), monkeypatch).faults
    assert any(message in fault for fault in faults), faults


def matrix(pack: Path, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tests" / "ptx_matrix.py"), str(pack), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def test_the_script_of_a_whole_pack(gpu_pack: Path, tmp_path: Path) -> None:
    ended = matrix(gpu_pack, tmp_path, "--orders", "1", "--tokens", "3")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[-1] == "0 wrong"
    assert sum(": code: right" in line for line in lines) == len(list(gpu_pack.glob("*.zip"))) - NO_GPU
    assert sum(": tokens: right" in line for line in lines) == 1


def test_the_script_ends_with_1_where_a_kernel_is_wrong(gpu_pack: Path, tmp_path: Path) -> None:
    """As if it had been compiled with other parameters."""
    pack = shutil.copytree(gpu_pack, tmp_path / "pack")
    index = json.loads((pack / "pack.json").read_text())
    (norm,) = (case for case in index["kernels"][0]["cases"] if case["label"] == "norm")
    norm["parameters"]["eps"] = 1e-3
    (pack / "pack.json").write_text(json.dumps(index))
    ended = matrix(pack, tmp_path, "--orders", "0", "--only", "kernels")
    assert ended.returncode == 1
    assert [line.partition(";")[0][:25] for line in ended.stdout.splitlines() if "WRONG" in line] == [
        "small: norm: WRONG: order"
    ]
