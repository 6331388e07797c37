"""Runs what NVRTC made of a pack's CUDA kernels without a GPU: the PTX itself, translated to C++ for the emulation.

    python tests/ptx_matrix.py build/gpu [--orders 0,1,2,3] [--tokens 12] [--only kernels models]

PACK is a folder that benchmarks/gpu_pack.py wrote. All its code is translated and checked as text: loads that may give
old values, and the machine code (tests/helpers/ptx). The small kernels run in several orders of threads and are
compared with eager PyTorch in float64, and the bundled model must choose the CPU's tokens. Prints a line for each
result; ends with 1 where one is wrong.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from helpers.fake_cuda.fixtures import compile_driver
from helpers.kernels.emulator import ORDERS
from helpers.ptx.cases import emulate_ptx, run_in_orders
from helpers.ptx.device_code import DeviceCode, code_of_pack
from helpers.ptx.errors import PtxError
from helpers.ptx.machine_code import later_registers, machine_faults, missing_later_ptxas, register_faults
from helpers.ptx.syntax import parse
from helpers.ptx.translate import source_of
from helpers.support import ROOT
from picompile_runtime.devices.cuda import driver

sys.path.insert(0, str(ROOT / "benchmarks"))

from _gpu_bundled import check_bundled
from _gpu_kernels import images_of

# Tokens of a prompt, decoded ones, and rounds of the measurement that comes with each model, whose times mean nothing.
_SHORTEST = (1, 1, 1)


class Result(NamedTuple):
    """One line."""

    name: str
    faults: list[str]
    facts: str


def check_code(code: DeviceCode) -> Result:
    """Translate the PTX, and check it and the machine code as text."""
    try:
        kernels = parse(code.ptx)
        source_of(kernels)
        faults = code.wrong_loads(kernels)
    except PtxError as error:
        return Result(f"{code.name}: code", [str(error)], "")
    faults += machine_faults(code, kernels)
    facts = f"{len(kernels)} launches"
    if reason := missing_later_ptxas():
        return Result(f"{code.name}: code", faults, f"{facts}; registers not compared: {reason}")
    registers = later_registers(code)
    most = max(each.later - each.pinned for each in registers.values())
    faults += register_faults(registers)
    return Result(f"{code.name}: code", faults, f"{facts}, {most:+} registers at most by a later ptxas")


def run_kernels(pack: Path, code: DeviceCode, work: Path, orders: list[int]) -> Iterator[Result]:
    """Run the cases of the pack whose code this is."""
    os.environ["FAKE_CUDA_KERNELS"] = str(emulate_ptx(code.ptx, work / f"{code.name}.so"))
    images = images_of(pack, code.name)
    groups = {group["folder"]: group["cases"] for group in _index(pack)["kernels"]}
    for case in groups[code.name]:
        found = run_in_orders(images, case, orders)
        yield Result(
            f"{code.name}: {found.label}", list(found.faults), f"error {found.error:.1e}, {found.seconds:.1f} s"
        )


def run_model(pack: Path, entry: dict[str, Any], code: DeviceCode, work: Path, tokens: int) -> Result:
    """Read the tokens that the CPU chose behind each prompt, and compare each choice."""
    os.environ["FAKE_CUDA_KERNELS"] = str(emulate_ptx(code.ptx, work / f"{code.name}.so"))
    begin = time.monotonic()
    found = check_bundled(pack, work / "artifact", entry, 1, _SHORTEST, tokens)
    facts = f"{found['tokens']['same']} of {found['tokens']['decided']} tokens that rounding does not decide"
    faults = [] if found["is_right"] else [f"other tokens than the CPU's: {facts}"]
    return Result(f"{code.name}: tokens", faults, f"{facts}, {time.monotonic() - begin:.0f} s")


def results(options: argparse.Namespace, work: Path) -> Iterator[Result]:
    """Yield all results, the quick ones first."""
    codes = {code.name: code for code in code_of_pack(options.pack)}
    if "code" in options.only:
        yield from map(check_code, codes.values())
    if "kernels" in options.only:
        yield from run_kernels(options.pack, codes["small"], work, options.orders)
    if "models" in options.only:
        for entry in _index(options.pack)["bundled"]:
            yield run_model(options.pack, entry, codes[Path(entry["file"]).stem], work, options.tokens)


def _index(pack: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((pack / "pack.json").read_text(encoding="utf-8"))
    return content


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path)
    parser.add_argument("--orders", type=_numbers, default=list(ORDERS), help="orders of threads; more are random ones")
    parser.add_argument("--tokens", type=int, default=12, help="of each prompt of the bundled model")
    parts = ["code", "kernels", "models"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        compile_driver(work / "driver")
        driver.LIBRARY = str(work / "driver" / "libcuda.so.1")
        os.environ |= {"FAKE_CUDA_SM": str(_index(options.pack)["sm"]), "FAKE_CUDA_VERSION": "12080"}
        for result in results(options, work):
            verdict = f"WRONG: {'; '.join(result.faults)}" if result.faults else "right"
            print(f"{result.name}: {verdict}{'; ' if result.facts else ''}{result.facts}", flush=True)
            wrong += bool(result.faults)
    print(f"{wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
