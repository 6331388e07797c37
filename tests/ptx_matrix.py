"""Runs what NVRTC made of a pack's CUDA kernels without a GPU: the PTX itself, translated to C++ for the emulation.

    python tests/ptx_matrix.py build/gpu [--orders 0,1,2,3] [--tokens 12] [--only kernels models]

PACK is a folder that benchmarks/gpu/pack.py wrote. All its code is translated and checked as text: loads that may give
old values, and the machine code (tests/helpers/ptx). The small kernels run in several orders of threads and are
compared with eager PyTorch in float64, and the bundled model must choose the CPU's tokens. Prints a line for each
result; ends with 1 where one is wrong.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.bundled import check_bundled
from benchmarks.gpu.kernels import images_of

sys.path.append(str(Path(__file__).parents[1]))

from helpers.fake_cuda.fixtures import compile_driver
from helpers.kernels.emulator import ORDERS
from helpers.ptx.cases import emulate_ptx, faults_in_orders
from helpers.ptx.device_code import DeviceCode, code_of_pack
from helpers.ptx.machine_code import later_faults, machine_faults, missing_later_ptxas
from helpers.ptx.syntax import PtxError, parse
from helpers.ptx.translate import source_of
from picompile_runtime.devices.cuda import driver

# Tokens of a prompt, decoded ones, and rounds of the measurement that comes with each model, whose times mean nothing.
_SHORTEST = (1, 1, 1)


def code_faults(code: DeviceCode) -> list[str]:
    """Translate the PTX, and check it and the machine code as text."""
    try:
        kernels = parse(code.ptx)
        source_of(kernels)
        faults = code.wrong_loads(kernels) + machine_faults(code, kernels)
    except PtxError as error:
        return [str(error)]
    return faults if missing_later_ptxas() else faults + later_faults(code)


def token_faults(pack: Path, entry: dict[str, Any], work: Path, tokens: int) -> list[str]:
    """Read the tokens that the CPU chose behind each prompt, and compare each choice that rounding does not decide."""
    found = check_bundled(pack, work / "artifact", entry, 1, _SHORTEST, tokens)
    compared = found["tokens"]
    return [] if found["is_right"] else [f"{compared['same']} of {compared['decided']} tokens are the CPU's"]


def results(options: argparse.Namespace, work: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the faults of each part, the quick ones first."""
    codes, index = {code.name: code for code in code_of_pack(options.pack)}, _index(options.pack)

    def emulate(name: str) -> None:
        os.environ["FAKE_CUDA_KERNELS"] = str(emulate_ptx(codes[name].ptx, work / f"{name}.so"))

    if "code" in options.only:
        yield from ((f"{name}: code", code_faults(code)) for name, code in codes.items())
    if "kernels" in options.only:
        emulate("small")
        (cases,) = (group["cases"] for group in index["kernels"] if group["folder"] == "small")
        images = images_of(options.pack, "small")
        yield from ((f"small: {case['label']}", faults_in_orders(images, case, options.orders)) for case in cases)
    if "models" in options.only:
        for entry in index["bundled"]:
            name = Path(entry["file"]).stem
            emulate(name)
            yield f"{name}: tokens", token_faults(options.pack, entry, work, options.tokens)


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
    if reason := missing_later_ptxas():
        print(f"registers are not compared: {reason}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        compile_driver(work / "driver")
        driver.LIBRARY = str(work / "driver" / "libcuda.so.1")
        os.environ |= {"FAKE_CUDA_SM": str(_index(options.pack)["sm"]), "FAKE_CUDA_VERSION": "12080"}
        for name, faults in results(options, work):
            print(f"{name}: {'WRONG: ' if faults else 'right'}{'; '.join(faults)}", flush=True)
            wrong += bool(faults)
    print(f"{wrong} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
