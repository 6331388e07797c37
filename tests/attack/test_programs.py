"""Programs with right hashes and wrong content are refused before anything of them runs, and the reason is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifact_mutations import copy_artifact, edited, seal, write
from artifacts import Base, use

import picompile_runtime
from helpers.damage import read_tensors
from helpers.gpu_artifacts import gpu_artifact, gpu_model
from helpers.support import BuildOnce, compile_for_test, save_tiny_llama
from picompile.compile import lower as compile_lower
from picompile_codegen.lowering.placement import ON_HOST
from picompile_runtime import ArtifactError

pytestmark = pytest.mark.slow("writes a damaged artifact for each case; checks of programs have fast tests")

__all__ = ["gpu_artifact", "gpu_model"]

Json = dict[str, Any]


@pytest.fixture(scope="session")
def lending_artifact(build_once: BuildOnce) -> Path:
    """Three layers whose caches the host lends for prompts to an accelerator that has some neurons."""

    def make(folder: Path) -> None:
        folder.mkdir()
        save_tiny_llama(folder / "model", num_hidden_layers=3)
        options = {"quant": "f16", "context": 32, "chunk": 16, "hot": {0: range(20)}, "accelerator": "cpu"}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compile_lower, "_placement", lambda plan, layers: ON_HOST)
            compile_for_test(folder / "model", folder / "artifact", **options)

    return build_once("lending-artifact", make) / "artifact"


@pytest.fixture
def copies(bases: list[Base], tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """Copies of the bases by name, and of the artifacts `gpu` and `lending`."""

    def copy(name: str) -> Path:
        known = {base.name: base.folder for base in bases}
        copy_artifact(known.get(name) or request.getfixturevalue(f"{name}_artifact"), tmp_path / name)
        return tmp_path / name

    return copy


def change(folder: Path, mutate: Callable[[Json], object]) -> None:
    with edited(folder, "program.json") as program:
        mutate(program)
    seal(folder)


def change_weight(folder: Path, name: str, value: int, before: int | None = None) -> None:
    """Put an integer in the place of the first of a weight."""
    path = folder / "weights.safetensors"
    header, _ = read_tensors(path)
    content = bytearray(path.read_bytes())
    place = 8 + int.from_bytes(content[:8], "little") + header[name]["data_offsets"][0]
    assert before is None or np.frombuffer(content[place : place + 4], np.int32) == before
    content[place : place + 4] = np.int32(value).tobytes()
    write(path, bytes(content))
    seal(folder)


def refuses(folder: Path, reason: str, load: bool = True) -> None:
    """`verify` says why, in one line, and so does `load` for an artifact that this machine could run."""
    for enter in (picompile_runtime.verify, picompile_runtime.load)[: 1 + load]:
        with pytest.raises(ArtifactError, match=reason) as caught:
            enter(folder)
        assert "\n" not in str(caught.value)


def call_of(program: Json, kernel: str, function: str = "decode") -> Json:
    return next(call for call in program["functions"][function] if call["kernel"].startswith(kernel))


def test_whole_artifacts_run(bases: list[Base], monkeypatch: pytest.MonkeyPatch) -> None:
    for base in bases[:3]:
        picompile_runtime.verify(base.folder)
        for mapped in ("0", "1"):
            monkeypatch.setenv("PICOMPILE_MMAP", mapped)
            assert use(base.folder).startswith("ran"), base.name


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


def _table_of_fewer_rows(program: Json) -> None:
    """A token could be one that the table does not have."""
    for arg in call_of(program, "embedding")["args"]:
        if "weight" in arg:
            arg["shape"] = [arg["shape"][0] - 1, *arg["shape"][1:]]


def _cache_in_no_memory(program: Json) -> None:
    next(iter(program["state"].values()))["memory"] = "shared"


def _tickets_elsewhere(program: Json) -> None:
    """The blocks of a kernel count each other in memory that other kernels write."""
    call = next(call for call in program["functions"]["decode"] if _has(call, "tickets"))
    tickets = next(arg for arg in call["args"] if arg.get("buffer") == "tickets")
    program["buffers"]["other"] = {**program["buffers"]["tickets"], "offset": program["accelerator_arena_bytes"]}
    program["accelerator_arena_bytes"] += 2**16
    tickets["buffer"] = "other"


def _tickets_over_values(program: Json) -> None:
    name = next(arg["buffer"] for arg in call_of(program, "receive")["args"] if "received" in arg.get("buffer", ""))
    program["buffers"][name]["offset"] = program["buffers"]["tickets"]["offset"]


def _stage_that_the_host_sees(program: Json) -> None:
    program["buffers"]["staging.1"] |= {"memory": "shared", "offset": program["shared_arena_bytes"]}
    program["shared_arena_bytes"] += 2**20


def _copy_as_a_launch(program: Json) -> None:
    call_of(program, "upload", "prefill_last")["op"] = "add"


def _count_in_a_buffer(program: Json) -> None:
    """It may change while the kernel reads it."""
    call_of(program, "counted_ffn", "prefill_last")["args"][2] = {"buffer": "step.accelerator", "shape": [1]}


def _has(call: Json, buffer: str) -> bool:
    return any(arg.get("buffer") == buffer for arg in call["args"])


@pytest.mark.parametrize("value", [-1, 0, 66, 68, 134, 2**31 - 1])
def test_a_count_of_neurons_that_are_not_there_is_refused(copies: Callable[[str], Path], value: int) -> None:
    """A block has 67 hot neurons and a slice of 133, which share a kernel."""
    folder = copies("gpu")
    change_weight(folder, "count.67", value, before=67)
    reason = r"takes (a number from 1 to 133 for count|decide_w\.data float16 \[6[68],)"
    refuses(folder, reason, load=False)


def _calls(program: Json, kernel: str) -> list[Json]:
    return [call for call in program["functions"]["prefill_last"] if call["kernel"].startswith(kernel)]


def _lend_without_waiting(program: Json) -> None:
    """The host goes on to the next layer before it knows that the accelerator has what it lent."""
    for kernel in ("wait", "cache_write"):
        for call in [call for call in _calls(program, kernel) if call.get("device") != "accelerator"][:2]:
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
    ("name", "mutate", "reason"),
    [
        ("masked", lambda program: _exchange(program, "decode", "prefill_last"), "is made for steps of 16 tokens"),
        ("masked", _weight_as_output, r"may not be given weight \S+ for y \(out\)"),
        ("masked", _output_over_weights_of_the_same_call, "is given y where another of its arguments is"),
        ("masked", _overlay, "reads a in .*, where nothing whole has been written before"),
        ("masked", lambda program: _drop(program, "embedding"), "reads x in .*embedding, where nothing whole"),
        ("masked", lambda program: _drop(program, "linear_f16_300"), "nothing whole is left in logits"),
        ("masked", _step_of_another, "is given tokens for its step"),
        ("hybrid", lambda program: _drop(program, "signal"), "waits for a flag that nobody sets"),
        ("hybrid", lambda program: _drop(program, "copy_words"), "reads step in step.accelerator, where nothing whole"),
        ("hybrid", _send_where_the_layer_before_was_sent, r"x\.sent, shared memory that may be in use in this step"),
        # What random damage hardly finds.
        ("masked", _misaligned_weight, "at byte 4, which is no multiple of 64"),
        ("masked", _row_of_a_mask, "reads a part of"),
        (
            "masked",
            _table_of_fewer_rows,
            r"embedding\S+ takes w\.data \S+ \[300, \d+\], and is given \S+ \[299, ",
        ),
        ("masked", _cache_in_no_memory, "may not be in shared memory"),
        # Tickets and copies are for their purpose alone: with another kernel's values, a block would add up what is not
        # there yet, or nothing at all.
        ("gpu", _tickets_elsewhere, r"may not be given buffer other for tickets \(tickets\)"),
        ("gpu", _tickets_over_values, "overlaps tickets"),
        ("gpu", _stage_that_the_host_sees, "uploads to memory that is not its device's own"),
        ("gpu", _copy_as_a_launch, "upload.* is called as add; only copies are called as upload, and all of them"),
        ("gpu", _count_in_a_buffer, r"is given no weight of int32 for count"),
        ("lending", _lend_without_waiting, "nothing whole has been written|shared memory that may be in use"),
        ("lending", _forget_to_borrow, "where no copy of state is"),
        ("lending", _attend_to_something_else, "is given q where another of its arg|where no copy of state is"),
    ],
)
def test_a_wrong_program_is_refused(
    copies: Callable[[str], Path], name: str, mutate: Callable[[Json], object], reason: str
) -> None:
    folder = copies(name)
    picompile_runtime.verify(folder)
    change(folder, mutate)
    refuses(folder, reason, load=name != "gpu")


def test_a_table_that_leads_out_of_a_mask_is_refused(copies: Callable[[str], Path]) -> None:
    folder = copies("hybrid")
    program = json.loads((folder / "program.json").read_bytes())
    args = [arg for calls in program["functions"].values() for call in calls for arg in call["args"] if "weight" in arg]
    table = min(arg["weight"] for arg in args if arg.get("dtype") == "int32")
    for value in (96, 2**31 - 1, -1):
        change_weight(folder, table, value)
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
