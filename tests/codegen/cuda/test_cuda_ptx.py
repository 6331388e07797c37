"""Runs what NVRTC made of kernels without a GPU, in several orders of threads, and compares with float64.

`python tests/ptx_matrix.py PACK` does so with all kernels of a pack, and with a whole model.
"""

import ctypes
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.gpu.cases import Case, pack_kernels, small_cases
from benchmarks.gpu.kernels import images_of
from helpers.fake_cuda.fixtures import fake_cuda, fake_library
from helpers.gpu_packs import gpu_pack
from helpers.kernels.emulator import ORDERS
from helpers.ptx.cases import emulate_ptx, faults_in_orders
from helpers.ptx.device_code import DeviceCode, code_of_pack
from helpers.ptx.machine_code import later_faults, machine_faults, missing_later_ptxas
from helpers.ptx.syntax import parse
from helpers.support import ROOT, BuildOnce

pytestmark = pytest.mark.slow("translates and runs the PTX of whole kernels; single instructions have fast tests")

__all__ = ["fake_cuda", "fake_library", "gpu_pack"]

# A kernel of each kind, and each format in one of those that have formats.
OF_EACH_KIND = (
    *("linear q6", "linear chunk q4m", "linear with norm q4", "embedding q8", "predictor q4m", "predictor by signs"),
    *("ffn masked q4", "ffn exact f16", "ffn dense q6", "ffn chunk q8", "ffn batch", "ffn without gate", "ffn part"),
    *("ffn part, shared q8", "ffn chunk, shared f16", "attention long q8", "attention float16"),
    *("attention chunk float16", "cache q8", "rms_norm", "layer_norm", "rotary", "add", "take_last", "join columns"),
    *("top logits 5003", "send mask", "send mask, shared", "receive", "receive mask", "sum with norm, received"),
    *("borrow cache", "copy words", "send"),
    *("linear q3_k", "linear iq4_xs", "linear nf4", "linear fp8", "linear chunk q2_k", "linear chunk nf4"),
    *("linear with norm q4_k", "embedding q6_k", "ffn whole", "ffn whole chunk"),
)
# By architecture: sm_75 has no asynchronous copies, and smaller products of matrices.
LABELS = {90: OF_EACH_KIND, 75: ("linear chunk q4m", "linear chunk q6_k", "ffn chunk q8", "attention chunk float16")}


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


@pytest.fixture(scope="module")
def packs(build_once: BuildOnce) -> dict[int, Pack]:
    """The kernels of each architecture."""
    found = {}
    for sm, labels in LABELS.items():
        folder = build_once(f"ptx-kernels-{sm}", lambda folder, labels=labels, sm=sm: _pack(folder, labels, sm))
        (code,) = code_of_pack(folder)
        found[sm] = Pack(folder, code, {case["label"]: case for case in json.loads((folder / "pack.json").read_text())})
    return found


def ran(pack: Pack, label: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the faults of a case on the stand-in, whose kernels are those of `library`."""
    for name, value in (("KERNELS", str(library)), ("SM", str(pack.code.sm)), ("VERSION", "12080")):
        monkeypatch.setenv(f"FAKE_CUDA_{name}", value)
    return faults_in_orders(images_of(pack.folder, "small"), pack.cases[label], ORDERS)


@pytest.mark.parametrize(("sm", "label"), [(sm, label) for sm, labels in LABELS.items() for label in labels])
def test_a_kernel(
    sm: int, label: str, packs: dict[int, Pack], fake_cuda: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ran(packs[sm], label, packs[sm].folder / "small.so", monkeypatch) == []


def test_the_code_as_text(packs: dict[int, Pack]) -> None:
    for code in (pack.code for pack in packs.values()):
        kernels = parse(code.ptx)
        assert (code.wrong_loads(kernels), machine_faults(code, kernels)) == ([], [])


def test_a_later_compiler_takes_few_more_registers(packs: dict[int, Pack]) -> None:
    if reason := missing_later_ptxas():
        pytest.skip(reason)
    assert [fault for pack in packs.values() for fault in later_faults(pack.code)] == []


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
    packs: dict[int, Pack],
    fake_cuda: ctypes.CDLL,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = ptx_of_case(packs[90], label)
    planted = re.sub(instruction, other, right, count=1)
    assert planted != right
    faults = ran(packs[90], label, emulate_ptx(planted, tmp_path / "planted.so"), monkeypatch)
    assert any(message in fault for fault in faults), faults


def test_the_script_of_a_whole_pack(gpu_pack: Path, tmp_path: Path) -> None:
    script = str(ROOT / "tests" / "ptx_matrix.py")
    command = [sys.executable, script, str(gpu_pack), "--tokens", "2", "--only", "code", "models"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[-1] == "0 wrong"
    with_code = [path for path in gpu_pack.glob("*.zip") if not path.name.endswith(".gguf.zip")]
    assert sum(": code: right" in line for line in lines) == len(with_code)
    assert sum(": tokens: right" in line for line in lines) == 1
