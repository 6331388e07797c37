"""A pack of benchmarks/gpu/pack.py as small as can be, its kernels in emulation, and how to run it: as fixtures."""

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import environment
from benchmarks.gpu.cases import Case, attention, ffn, pack_kernels
from benchmarks.gpu.models import ModelOptions, pack_model
from benchmarks.gpu.pack_bundled import BundledOptions, pack_bundled
from benchmarks.gpu.pack_gguf import pack_gguf
from benchmarks.gpu.sources import SCHEMA, sources_digest
from helpers.fake_cuda.fixtures import fake_cuda, fake_library
from helpers.kernels.emulator import Emulated
from helpers.support import BuildOnce, save_tiny_llama
from picompile.machine.targets import native_target
from picompile.synth.shapes import shape_from_config
from picompile_codegen.build.host_library import build_host_library

__all__ = ["fake_cuda", "fake_library", "gpu_pack", "kernels"]

BUDGET = 0.7
SHAPE = {
    "model_type": "llama", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 384, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "relu", "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
MASK = {"dim": 33, "neurons": 77, "columns": 55, "rows": 3}
CASES = [
    Case("linear", "linear", {"format": "q4", "n": 35, "k": 72, "rows": 1, "bias": True}),
    Case("ffn", "ffn", ffn("f16", "masked", 77, 40), shares=(0.3,)),
    Case("attention", "attention", attention(20, "float16", heads=(4, 2, 16))),
    Case("send mask", "send_mask", MASK),
    Case("norm", "rms_norm", {"dim": 100, "rows": 3, "eps": 1e-5}),
    Case("upload", "upload", {"size": 5000}),
    Case("leading", "top_logits", {"vocab": 2100, "rows": 3}),
    Case("ffn shared", "counted_ffn", ffn("f16", "masked", 130, 40, mask_columns=150, count=77), shares=(0.3,)),
    Case("chunk shared", "counted_ffn", ffn("q4", "dense", 130, 40, rows=5, count=77)),
    Case("send mask shared", "counted_send_mask", {**MASK, "count": 28, "in_words": True}),
    Case("borrow", "borrow_cache", {"kv_heads": 2, "width": 12, "dtype": "float16", "context": 9}),
    Case("join", "join_columns", {"widths": (5, 12), "rows": 3}),
]
TIMED = [
    Case("timed linear", "linear", {"format": "q4", "n": 40, "k": 64, "rows": 5, "bias": False}, True, streamed=True),
    # The first command asks for this one by its label, and for some of its shares.
    Case("ffn masked 28672x8192 q4", "ffn", ffn("f16", "masked", 70, 40), True, shares=(0.2, 0.3)),
]
_DEFINITION = re.compile(
    r'extern "C" __global__ void __launch_bounds__\([^)]*\) (\w+)\([^)]*\) \{\n.*?\n\}\n', re.DOTALL
)


def _pack(folder: Path) -> None:
    """A pack as benchmarks.gpu.pack writes it, of a few small kernels and models of one layer."""
    folder.mkdir()
    build_host_library((), folder / "host.so")
    kernels = [
        {"folder": name, "cases": pack_kernels(cases, folder / f"{name}.zip", 90)}
        for name, cases in (("small", CASES), ("speed", TIMED))
    ]
    entries = tiny_models(folder, "f16", ("hybrid", "layers_dense"))
    del entries["layers_dense_4090"]
    save_tiny_llama(folder / "model", num_hidden_layers=1)
    bundled = BundledOptions(folder / "model", "h100", 40, 4, ("a", "sparse rows"), (("f16", "split"),))
    index = {
        "schema": SCHEMA,
        "commit": "the working tree",
        "sources": sources_digest(),
        "llama": None,
        "sm": 90,
        "host": "host.so",
        "kernels": kernels,
        "checks": [entries["hybrid"]],
        "bundled": list(pack_bundled(bundled, folder)),
        "models": list(entries.values()),
    }
    (folder / "pack.json").write_text(json.dumps(index))
    emulated_kernels(folder)


def tiny_models(folder: Path, quant: str, variants: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Pack variants of a model of one layer; return their entries, and those of what is planned for another GPU.

    The schedule asks for the model by the name of the one that it stands for.
    """
    options = ModelOptions(quant, BUDGET, 32, 40, 90, native_target().isas[:1])
    shape = shape_from_config("llama-70b", SHAPE)
    gguf = {"gguf": pack_gguf(shape, folder)}
    entries = {variant: pack_model(shape, options, variant, folder) | gguf for variant in variants}
    # Here they are the same split.
    for name in ("hybrid", "layers_dense"):
        entries[f"{name}_4090"] = entries[name] | {"variant": f"{name}_4090", "plan": {"computed": 0.3}}
    return entries


def emulated_kernels(folder: Path) -> None:
    """Compile all kernels of a pack for the emulation, into its `emulated.so`."""
    Emulated("".join(_sources(folder)), folder / "emulated.so")


def _sources(folder: Path) -> Iterator[str]:
    """Yield the parts of one source with all kernels of a pack: the stand-in takes one library."""
    texts = []
    # The small kernels first: a pack has them all in one file.
    for path in sorted(folder.glob("*.zip"), key=lambda path: path.stem != "small"):
        with zipfile.ZipFile(path) as archive:
            names = {"device.cu", "kernels/device.cu"} & set(archive.namelist())
            texts += [archive.read(name).decode() for name in names]
    known = {match[1] for match in _DEFINITION.finditer(texts[0])}
    yield texts[0]
    for match in (match for text in texts[1:] for match in _DEFINITION.finditer(text)):
        if match[1] not in known:
            known.add(match[1])
            yield match[0]


@pytest.fixture(scope="session")
def gpu_pack(build_once: BuildOnce) -> Path:
    """The folder of a pack. Tests must not change it."""
    return build_once("gpu-pack", _pack)


@pytest.fixture
def kernels(gpu_pack: Path, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The cases of the pack by label, with the stand-in in the place of the driver."""
    for name, value in stand_in(gpu_pack).items():
        monkeypatch.setenv(name, value)
    return {case["label"]: case for group in index_of(gpu_pack)["kernels"] for case in group["cases"]}


def stand_in(gpu_pack: Path) -> dict[str, str]:
    """The environment in which the stand-in has the kernels of the pack."""
    return {"FAKE_CUDA_KERNELS": str(gpu_pack / "emulated.so"), "FAKE_CUDA_SM": "90", "FAKE_CUDA_VERSION": "12080"}


def index_of(gpu_pack: Path) -> dict[str, Any]:
    """The list of what is in the pack."""
    content: dict[str, Any] = json.loads((gpu_pack / "pack.json").read_text())
    return content


def command(pack: Path, library: Path, folder: Path, verb: str = "first", *options: str) -> list[str]:
    """A command of benchmarks.gpu on the stand-in, whose results and weights are in `folder`."""
    where = ["--results", str(folder / "results"), "--work", str(folder / "work"), "--device-library", str(library)]
    return [sys.executable, "-m", "benchmarks.gpu", verb, str(pack), *where, *options]


def ran(
    pack: Path,
    library: Path,
    folder: Path,
    verb: str = "first",
    *options: str,
    variables: dict[str, str] | None = None,
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """How a command ended, and its results. `variables` replace those of the environment.

    Parts have ten times their time: kernels in emulation are slow.
    """
    ended = subprocess.run(
        command(pack, library, folder, verb, "--scale", "10", *options),
        env=environment(**stand_in(pack) | (variables or {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=folder,
    )
    results = folder / "results" / f"{verb}.json"
    assert results.exists(), f"exit code {ended.returncode}: {ended.stdout[-2000:]}"
    return ended, json.loads(results.read_text())
