"""Programs with right hashes and wrong content are refused before anything of them runs, and the reason is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact_mutations import copy_artifact, seal, write
from artifacts import Base, use

import picompile_runtime
from helpers.gpu_artifacts import gpu_artifact, gpu_model
from helpers.support import BuildOnce, compile_for_test, save_tiny_llama
from picompile import compile_steps
from picompile_codegen.lowering.placement import ON_HOST
from picompile_runtime import ArtifactError

pytestmark = pytest.mark.slow("writes a damaged artifact for each case; checks of programs have fast tests")

__all__ = ["gpu_artifact", "gpu_model"]

Json = dict[str, Any]


@pytest.fixture
def copies(bases: list[Base], tmp_path: Path) -> Callable[[str], Path]:
    """Copies of the bases by name."""

    def copy(name: str) -> Path:
        copy_artifact(next(base.folder for base in bases if base.name == name), tmp_path / name)
        return tmp_path / name

    return copy


def change(folder: Path, mutate: Callable[[Json], object]) -> None:
    program = json.loads((folder / "program.json").read_bytes())
    mutate(program)
    write(folder / "program.json", json.dumps(program).encode())
    seal(folder)


def refuses(folder: Path, reason: str) -> None:
    """`load` and `verify` say why, in one line."""
    for enter in (picompile_runtime.load, picompile_runtime.verify):
        with pytest.raises(ArtifactError, match=reason) as caught:
            enter(folder)
        assert "\n" not in str(caught.value)


def call_of(program: Json, kernel: str, function: str = "decode") -> Json:
    return next(call for call in program["functions"][function] if call["kernel"].startswith(kernel))


def test_whole_artifacts_run(bases: list[Base]) -> None:
    for base in bases:
        assert use(base.folder).startswith("ran"), base.name
        picompile_runtime.verify(base.folder)


def _exchange(program: Json, one: str, other: str) -> None:
    for table in (program["functions"], program["logits"]):
        table[one], table[other] = table[other], table[one]


def _weight_as_output(program: Json) -> None:
    call = call_of(program, "rms_norm")
    weight = next(arg for arg in call["args"] if "weight" in arg)
    call["args"][-1] = {"weight": weight["weight"], "dtype": "float32", "shape": [1, 96]}


def _output_over_weights_of_the_same_call(program: Json) -> None:
    call = call_of(program, "add")
    call["args"][-1] = call["args"][1]


def _drop(program: Json, kernel: str, function: str = "decode") -> None:
    program["functions"][function].remove(call_of(program, kernel, function))


def _overlay(program: Json) -> None:
    """Place the first norm's output over the embedding, which is read again later."""
    embedding, norm = call_of(program, "embedding"), call_of(program, "rms_norm")
    buffers = program["buffers"]
    read, written = embedding["args"][-1]["buffer"], call_of(program, "linear")["args"][-1]["buffer"]
    assert norm["args"][1]["buffer"] == read
    buffers[written]["offset"] = buffers[read]["offset"]


def _other_rows(program: Json) -> None:
    program["functions"]["decode"] = program["functions"]["score"]
    program["logits"]["decode"] = "logits"


def _step_of_another(program: Json) -> None:
    call_of(program, "rms_norm")["args"][0] = {"buffer": "tokens", "shape": [8]}


def _misaligned_weight(program: Json) -> None:
    call_of(program, "rms_norm")["args"][2] = {
        "weight": "layers.0.ffn.neurons", "dtype": "float32", "shape": [96], "offset": 4,
    }  # fmt: skip


def _row_of_a_mask(program: Json) -> None:
    """A kernel for one token reads a row of what a kernel for several has made: the step may not have that row."""
    one, several = call_of(program, "ffn"), call_of(program, "ffn", "batch")
    given = [{**argument} for argument in one["args"]]
    for place in (1, 2):
        given[place] = {"buffer": several["args"][place]["buffer"], "shape": [1, 96]}
    for number, argument in enumerate(given):
        if argument.get("buffer", "").startswith("decode."):  # in a place of its own
            program["buffers"][f"free.{number}"] = {**program["buffers"][argument["buffer"]]}
            program["buffers"][f"free.{number}"]["offset"] = program["arena_bytes"]
            argument["buffer"] = f"free.{number}"
            program["arena_bytes"] += 2**16
    batch = program["functions"]["batch"]
    batch.insert(batch.index(several), {**one, "args": given})


def _send_where_the_layer_before_was_sent(program: Json) -> None:
    """Its neurons may be none; then the accelerator does not wait, and does not know that the host has read it."""
    names = [arg["buffer"] for call in program["functions"]["decode"] for arg in call["args"] if "x.sent" in str(arg)]
    first, second = list(dict.fromkeys(names))[:2]
    program["buffers"][second]["offset"] = program["buffers"][first]["offset"]


def _cache_in_no_memory(program: Json) -> None:
    next(iter(program["state"].values()))["memory"] = "shared"


@pytest.mark.parametrize(
    ("name", "mutate", "reason"),
    [
        ("masked", lambda program: _exchange(program, "score", "batch"), "must be float32|is made for"),
        ("masked", lambda program: _exchange(program, "decode", "prefill_last"), "is made for steps of 16 tokens"),
        ("masked", _other_rows, "is made for steps of 16 tokens, and here they have 1"),
        ("masked", _weight_as_output, r"may not be given weight \S+ for y \(out\)"),
        ("masked", _output_over_weights_of_the_same_call, "is given y where another of its arguments is"),
        ("masked", _overlay, "reads a in .*, where nothing whole has been written before"),
        ("masked", lambda program: _drop(program, "embedding"), "reads x in .*embedding, where nothing whole"),
        ("masked", lambda program: _drop(program, "predict"), "reads mask in .*, where nothing whole"),
        ("masked", lambda program: _drop(program, "linear_f16_300"), "nothing whole is left in logits"),
        ("masked", _step_of_another, "is given tokens for its step"),
        ("hybrid", lambda program: _drop(program, "signal"), "waits for a flag that nobody sets"),
        ("hybrid", lambda program: _drop(program, "wait"), "nothing whole has been written before"),
        ("hybrid", lambda program: _drop(program, "copy_words"), "reads step in step.device, where nothing whole"),
        ("hybrid", _send_where_the_layer_before_was_sent, r"x\.sent, shared memory that may be in use in this step"),
        # What random damage hardly finds.
        ("masked", _misaligned_weight, "at byte 4, which is no multiple of 64"),
        ("masked", _row_of_a_mask, "reads a part of"),
        ("masked", _cache_in_no_memory, "may not be in shared memory"),
        ("hybrid", _cache_in_no_memory, "may not be in shared memory"),
    ],
)
def test_a_wrong_program_is_refused(
    copies: Callable[[str], Path], name: str, mutate: Callable[[Json], object], reason: str
) -> None:
    folder = copies(name)
    change(folder, mutate)
    refuses(folder, reason)


def _tickets_elsewhere(program: Json) -> None:
    """The blocks of a kernel count each other in memory that other kernels write."""
    call = next(call for call in program["functions"]["decode"] if _has(call, "tickets"))
    tickets = next(arg for arg in call["args"] if arg.get("buffer") == "tickets")
    program["buffers"]["other"] = {**program["buffers"]["tickets"], "offset": program["device_arena_bytes"]}
    program["device_arena_bytes"] += 2**16
    tickets["buffer"] = "other"


def _result_in_tickets(program: Json) -> None:
    program["buffers"]["tickets"] |= {"dtype": "float32", "shape": [2**12], "offset": program["device_arena_bytes"]}
    program["device_arena_bytes"] += 2**16
    call_of(program, "receive")["args"][-1] = {"buffer": "tickets", "dtype": "float32", "shape": [1, 96]}


def _tickets_over_values(program: Json) -> None:
    name = next(arg["buffer"] for arg in call_of(program, "receive")["args"] if "received" in arg.get("buffer", ""))
    program["buffers"][name]["offset"] = program["buffers"]["tickets"]["offset"]


def _stage_that_the_host_sees(program: Json) -> None:
    program["buffers"]["stage.1"] |= {"memory": "shared", "offset": program["shared_arena_bytes"]}
    program["shared_arena_bytes"] += 2**20


def _copy_as_a_launch(program: Json) -> None:
    call_of(program, "upload", "prefill_last")["op"] = "add"


def _has(call: Json, buffer: str) -> bool:
    return any(arg.get("buffer") == buffer for arg in call["args"])


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (_tickets_elsewhere, r"may not be given buffer other for tickets \(tickets\)"),
        (_result_in_tickets, r"may not be given buffer tickets for y \(out\)"),
        (_tickets_over_values, "overlaps tickets"),
        (_stage_that_the_host_sees, "uploads to memory that is not its device's own"),
        (_copy_as_a_launch, "upload.* is called as add; only copies are called as upload, and all of them"),
    ],
)
def test_tickets_and_copies_are_for_their_purpose_alone(
    gpu_artifact: Path, tmp_path: Path, mutate: Callable[[Json], object], reason: str
) -> None:
    """Another kernel's values there would make a block add up what is not there yet, or nothing at all."""
    copy_artifact(gpu_artifact, tmp_path / "gpu")
    picompile_runtime.verify(tmp_path / "gpu")
    change(tmp_path / "gpu", mutate)
    with pytest.raises(ArtifactError, match=reason):
        picompile_runtime.verify(tmp_path / "gpu")


@pytest.mark.parametrize("value", [-1, 0, 66, 68, 134, 2**31 - 1])
def test_a_count_of_neurons_that_are_not_there_is_refused(gpu_artifact: Path, tmp_path: Path, value: int) -> None:
    """A block has 67 hot neurons and a slice of 133, which share a kernel."""
    folder = tmp_path / "gpu"
    copy_artifact(gpu_artifact, folder)
    path = folder / "weights.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    begin, _ = json.loads(content[8 : 8 + size])["count.67"]["data_offsets"]
    place = slice(8 + size + begin, 8 + size + begin + 4)
    assert np.frombuffer(content[place], np.int32) == 67
    content[place] = np.int32(value).tobytes()
    write(path, bytes(content))
    seal(folder)
    with pytest.raises(
        ArtifactError, match=r"takes (a number from 1 to 133 for count|decide_w\.data float16 \[6[68],)"
    ):
        picompile_runtime.verify(folder)


def test_a_count_must_be_a_weight(gpu_artifact: Path, tmp_path: Path) -> None:
    """A buffer may change while the kernel reads it."""
    copy_artifact(gpu_artifact, tmp_path / "gpu")

    def mutate(program: Json) -> None:
        call_of(program, "counted_ffn", "prefill_last")["args"][2] = {"buffer": "step.device", "shape": [1]}

    change(tmp_path / "gpu", mutate)
    with pytest.raises(ArtifactError, match=r"is given no weight of int32 for count"):
        picompile_runtime.verify(tmp_path / "gpu")


@pytest.fixture(scope="session")
def lending_artifact(build_once: BuildOnce) -> Path:
    """Three layers whose caches the host lends for prompts to an accelerator that has some neurons."""

    def make(folder: Path) -> None:
        folder.mkdir()
        save_tiny_llama(folder / "model", num_hidden_layers=3)
        options = {"quant": "f16", "context": 32, "chunk": 16, "hot": {0: range(20)}, "hot_device": "cpu"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compile_steps, "_placement", lambda plan, layers: ON_HOST)
            compile_for_test(folder / "model", folder / "artifact", **options)

    return build_once("lending-artifact", make) / "artifact"


def _calls(program: Json, kernel: str) -> list[Json]:
    return [call for call in program["functions"]["prefill_last"] if call["kernel"].startswith(kernel)]


def _lend_two_in_one_place(program: Json) -> None:
    keys, values = (call["args"][-1]["buffer"] for call in _calls(program, "lend_cache")[:2])
    program["buffers"][values]["offset"] = program["buffers"][keys]["offset"]


def _lend_without_waiting(program: Json) -> None:
    """The host goes on to the next layer before it knows that the accelerator has what it lent."""
    for kernel in ("wait", "cache_write"):
        for call in [call for call in _calls(program, kernel) if call.get("device") != "device"][:2]:
            program["functions"]["prefill_last"].remove(call)


def _forget_to_borrow(program: Json) -> None:
    program["functions"]["prefill_last"].remove(_calls(program, "borrow_cache")[2])


def _attend_to_something_else(program: Json) -> None:
    """The queries lie in a buffer that is large enough."""
    args = _calls(program, "attention")[0]["args"]
    number = next(number for number, arg in enumerate(args) if "borrowed" in str(arg))
    shape = program["buffers"][args[number]["buffer"]]["shape"]
    args[number] = {"buffer": args[1]["buffer"], "dtype": "float16", "shape": shape}


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (_lend_two_in_one_place, "reads source in .*k.lent, where nothing whole has been written"),
        (_lend_without_waiting, "where nothing whole has been written|shared memory that may be in use"),
        (_forget_to_borrow, "where no copy of a cache is"),
        (_attend_to_something_else, "is given q where another of its arguments is|where no copy of a cache is"),
    ],
)
def test_caches_are_lent_in_order(
    lending_artifact: Path, tmp_path: Path, mutate: Callable[[Json], object], reason: str
) -> None:
    copy_artifact(lending_artifact, tmp_path / "lending")
    picompile_runtime.verify(tmp_path / "lending")
    change(tmp_path / "lending", mutate)
    refuses(tmp_path / "lending", reason)


@pytest.mark.parametrize("mapped", ["0", "1"])
def test_whole_artifacts_run_with_mapped_weights(
    bases: list[Base], monkeypatch: pytest.MonkeyPatch, mapped: str
) -> None:
    monkeypatch.setenv("PICOMPILE_MMAP", mapped)
    for base in bases[:3]:
        assert use(base.folder).startswith("ran"), base.name


def test_a_table_that_leads_out_of_a_mask_is_refused(copies: Callable[[str], Path]) -> None:
    folder = copies("hybrid")
    path = folder / "weights.safetensors"
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    program = json.loads((folder / "program.json").read_bytes())
    calls = [call for each in program["functions"].values() for call in each]
    weights = (arg for call in calls for arg in call["args"] if "weight" in arg)
    tables = {arg["weight"] for arg in weights if arg.get("dtype") == "int32"}
    begin, _ = json.loads(content[8 : 8 + size])[sorted(tables)[0]]["data_offsets"]
    for value in (96, 2**31 - 1, -1):
        content[8 + size + begin : 8 + size + begin + 4] = np.int32(value).tobytes()
        write(path, bytes(content))
        seal(folder)
        refuses(folder, r"takes numbers below 96 for table, and \S+ has from .* to")


@pytest.mark.parametrize("file", ["manifest.json", "program.json"])
def test_a_key_that_is_there_twice_is_refused(copies: Callable[[str], Path], file: str) -> None:
    folder = copies("opt")
    text = (folder / file).read_bytes()
    write(folder / file, re.sub(rb'"context": 64', b'"context": 64, "context": 64', text, count=1))
    if file == "program.json":
        seal(folder)
    refuses(folder, f"{file}: is not valid JSON .the key 'context' is there twice")


def test_the_manifest_vouches_for_itself(copies: Callable[[str], Path]) -> None:
    """Facts that no other file has: quantization, model, and whatever else is written there."""
    folder = copies("opt")
    text = (folder / "manifest.json").read_bytes()
    for changed in (text.replace(b'"f16"', b'"q4"', 1), text + b"\n", text.replace(b"\n", b"", 1), text.lower()):
        assert changed != text
        write(folder / "manifest.json", changed)
        refuses(folder, r"manifest.json: (was changed \(its sha256|format is not)")
