"""Checks and measures what `gpu_pack.py` packed, on a machine with a GPU, PyTorch, numpy and tokenizers.

    python benchmarks/gpu.py build/gpu [--quick] [--only kernels models ablation] [--json FILE]

1. Every kernel of the pack against eager PyTorch in float64, within 1e-3 of the largest value: random inputs, poisoned
   outputs, guards around all small arguments. So is a small model, split over both devices and all on the GPU.
2. `kernels`: the time of each kernel whose speed matters, as a share of the bandwidth of copies within the GPU's memory
   (read and written bytes), measured in the same run; weights take turns so that they come from memory. And cuBLAS.
3. `models`: decode speed with a budget of GPU memory, of the hybrid engine, of dense layer offloading (the layers that
   do not fit computed on the CPU by the same kernels, and copied to the GPU by PyTorch: it is held against the faster
   one), all on the CPU, all on the GPU. Weights are made here from a seed: see `_gpu_weights.py`.
4. `ablation`: dense layer offloading; with predictors and sparse operators; with the hybrid engine, which neurons are
   hot being chosen blindly; with the ones chosen that fire most often.

`--quick` stops after the first, and is short enough for compute-sanitizer:

    compute-sanitizer --error-exitcode 1 python benchmarks/gpu.py build/gpu --quick

The tables come last, and of them the bars. The exit code is 1 where anything is wrong; a missed bar is no error.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
try:
    import picompile_runtime  # noqa: F401
except ImportError:
    sys.path.insert(0, str(_ROOT / "runtime"))

import torch  # noqa: E402
from _gpu_copied import measure_copied  # noqa: E402
from _gpu_cublas import matrix_vector_seconds  # noqa: E402
from _gpu_engines import Settings, check_model, measure_model  # noqa: E402
from _gpu_kernels import check, copy_bandwidth, images_of, measure, opened  # noqa: E402
from _gpu_report import describe, text_of  # noqa: E402

from picompile_runtime.cuda import driver  # noqa: E402

SCHEMA = 1
_PARTS = ("kernels", "models", "ablation")
# Variant, and whether the neurons that fire most are the hot ones.
_OF_MODELS = (("hybrid", True), ("layers_dense", True), ("cpu", True), ("gpu", True))
_OF_ABLATION = (("layers_dense", True), ("layers", True), ("hybrid", False), ("hybrid", True))

Result = dict[str, Any]


def main() -> None:
    options = _arguments()
    if options.device_library:
        driver.LIBRARY = options.device_library
        options.quick = True
    pack = json.loads((options.pack / "pack.json").read_text())
    if pack["schema"] != SCHEMA:
        sys.exit(f"{options.pack}: is of schema {pack['schema']}, and this script knows {SCHEMA}; pack it again")
    results = _empty(options, pack)
    with tempfile.TemporaryDirectory(prefix="picompile-gpu.", dir=options.work) as work:
        _run(options, pack, Path(work), results)
    print(text_of(results))
    if not all(row["is_right"] for row in (*results["kernels"], *results["checks"])):
        sys.exit(1)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pack", type=Path, help="the folder that gpu_pack.py wrote")
    parser.add_argument("--quick", action="store_true", help="only what is right and what is not, small")
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=list(_PARTS), help="beside the checks")
    parser.add_argument("--models", nargs="+", metavar="SHAPE:QUANT", help="of those in the pack; all without it")
    parser.add_argument("--active", type=float, default=0.05, help="share of the neurons that are computed for a token")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens of a round")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of a model, beside the first one")
    parser.add_argument("--work", type=Path, help="where weights are made; best in memory, such as /dev/shm")
    parser.add_argument("--json", type=Path, help="where the results go as well")
    parser.add_argument("--device-library", help="a stand-in for libcuda.so.1; nothing is timed then")
    return parser.parse_args()


def _empty(options: argparse.Namespace, pack: Result) -> Result:
    """What is known before anything ran; of a machine without a GPU it raises NoGpuError."""
    with opened(images_of(options.pack / pack["kernels"][0]["folder"] / "kernels")) as device:
        machine = {"gpu": device.name, "sm": device.sm, "bytes": device.total_bytes, "driver": device.driver_version}
    machine["torch"] = torch.__version__
    return {
        "schema": SCHEMA,
        "stand_in": bool(options.device_library),
        "machine": machine,
        "copy_bytes_per_s": None,
        "kernels": [],
        "cublas": {},
        "checks": [],
        "models": [],
    }


def _run(options: argparse.Namespace, pack: Result, work: Path, results: Result) -> None:
    torch_device = "cpu" if options.device_library or not torch.cuda.is_available() else "cuda"
    settings = Settings(
        options.pack, work, options.active, options.threads, options.prompt, options.tokens, options.repeats
    )
    for row in _checks(options, pack, settings, torch_device, results):
        _save(options, results)
        _say(f"{'right' if row['is_right'] else 'WRONG'} {row['label']} {row['error']:.1e}")
    if options.quick:
        return
    if "kernels" in options.only:
        _measure_kernels(options, pack, torch_device, results)
    wanted = {f"{row['model']}:{row['quant']}": None for row in pack["models"]}
    for name in options.models or wanted:
        _measure_models(name, options, pack, settings, results)


def _checks(
    options: argparse.Namespace, pack: Result, settings: Settings, torch_device: str, results: Result
) -> Iterator[Result]:
    small = next(group for group in pack["kernels"] if group["folder"] == "small")
    images = images_of(options.pack / small["folder"] / "kernels")
    for case in small["cases"]:
        for row in check(images, case, torch_device):
            results["kernels"].append(row)
            yield row
    for entry in pack["checks"]:
        results["checks"].append(check_model(settings, entry, torch_device))
        yield results["checks"][-1]


def _measure_kernels(options: argparse.Namespace, pack: Result, torch_device: str, results: Result) -> None:
    for group in (group for group in pack["kernels"] if group["folder"] == "speed"):
        images = images_of(options.pack / group["folder"] / "kernels")
        results["copy_bytes_per_s"] = copy_bandwidth(images)
        for case in group["cases"]:
            for row in measure(images, case, torch_device, results["copy_bytes_per_s"]):
                results["kernels"].append(row)
                share = "" if row["share"] is None else f" at {row['share']:.0%}"
                of_copies = f", {row['copy_share']:.0%} of copies" if "copy_share" in row else ""
                _say(f"{row['label']}{share}: {row['seconds'] * 1e6:.1f} µs{of_copies}, error {row['error']:.1e}")
            _give_back()
    if torch_device == "cuda":
        for key, matrices in (("gated", 3), ("plain", 2)):
            results["cublas"][key] = matrix_vector_seconds(4096, 4096, matrices)
        _give_back()
    _save(options, results)


def _measure_models(name: str, options: argparse.Namespace, pack: Result, settings: Settings, results: Result) -> None:
    entries = {row["variant"]: row for row in pack["models"] if f"{row['model']}:{row['quant']}" == name}
    if not entries:
        sys.exit(f"{options.pack}: has no model {name}")
    asked = (*_OF_MODELS,) if "models" in options.only else ()
    asked += _OF_ABLATION if "ablation" in options.only else ()
    for variant, skew in dict.fromkeys(asked):
        if variant in entries:
            _add(options, measure_model(settings, entries[variant], skew), results)
    if asked and "layers_dense" in entries and torch.cuda.is_available():
        _add(options, measure_copied(entries["layers_dense"], options.tokens, options.repeats, "cuda"), results)
        _give_back()


def _add(options: argparse.Namespace, row: Result, results: Result) -> None:
    results["models"].append(row)
    _save(options, results)
    speed = f"{row['tokens_per_s']:.2f} tokens/s" if "tokens_per_s" in row else row["reason"]
    _say(f"{row['model']} {row['quant']}, {describe(row)}: {speed}")


def _save(options: argparse.Namespace, results: Result) -> None:
    """Again and again, so that what is killed has left what it knew."""
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def _give_back() -> None:
    """PyTorch keeps memory that it no longer uses."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
