from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.descriptors import descriptors
from helpers.toys.toy_artifact import code_entry, make_toy, safetensors, toy_program, write_manifest
from picompile_runtime import ArtifactError, DoesNotFitError, MachineError, RequestError, load, verify
from picompile_runtime.artifact import reader as artifact
from picompile_runtime.artifact.manifest import sealed
from picompile_runtime.devices import machine

FILES = ("manifest.json", "program.json", "weights.safetensors", "kernels/host.so", "tokenizer.json")
WEIRD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    2**31,
    2**63,
    2**200,
    1.5,
    "",
    "x",
    [],
    [0],
    [-1],
    [2**40] * 8,
    {},
    {"a": 1},
]


@pytest.fixture
def folder(make_artifact: Callable[..., Path]) -> Path:
    return make_artifact(texts={"tokenizer.json": "{}"})


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(path.read_text())
    change(data)
    is_manifest = path.name == "manifest.json" and isinstance(data, dict)
    path.write_bytes(sealed(data) if is_manifest else json.dumps(data).encode())


def fails(folder: Path, match: str, kind: type[Exception] = ArtifactError) -> None:
    """Opening and verifying both fail, with one line that names a file or folder of the artifact."""
    for use in (load, verify):
        with pytest.raises(kind, match=match) as caught:
            use(folder)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


# ---- whole artifacts ----


def test_a_whole_artifact_opens_and_verifies(folder: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    manifest = verify(folder, lambda name, done, size: seen.append((name, done, size)))
    assert manifest.model["name"] == "toy"
    assert {name for name, done, size in seen if done == size} == set(FILES) - {"manifest.json"}
    with load(folder) as engine:
        assert engine.context == 40
        assert engine.artifact.eos_token_ids == {0}


def test_generation_defaults_add_end_tokens(make_artifact: Callable[..., Path]) -> None:
    folder = make_artifact(texts={"generation_config.json": '{"eos_token_id": [3, 4]}'})
    with load(folder) as engine:
        assert engine.artifact.eos_token_ids == {0, 3, 4}


def test_weights_are_mapped_and_read_only(folder: Path) -> None:
    with load(folder) as engine:
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder / "weights") in line]
        assert [line.split()[1] for line in maps] == ["r--s"]
        engine.prefill([1, 2])


# ---- damage ----


@pytest.mark.parametrize("name", FILES[1:])
def test_flipped_bits_are_found(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    positions = random.Random(name).sample(range(len(data) * 8), min(40, len(data) * 8))
    for position in positions:
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        (folder / name).write_bytes(changed)
        fails(folder, rf"{name}: was changed \(its sha256")
    (folder / name).write_bytes(data)
    load(folder).close()


@pytest.mark.parametrize("name", FILES)
def test_truncated_and_grown_files_are_found(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    for changed in (b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\0", data + b" "):
        (folder / name).write_bytes(changed)
        fails(folder, f"{name}: (has .* bytes instead of|is not valid JSON|was changed)")


@pytest.mark.parametrize("name", FILES)
def test_missing_files_are_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    fails(folder, f"{name}: cannot be opened \\(No such file")


@pytest.mark.parametrize("name", FILES)
def test_files_must_be_files(folder: Path, name: str, tmp_path: Path) -> None:
    original = tmp_path / "elsewhere"
    (folder / name).rename(original)
    (folder / name).symlink_to(original)
    fails(folder, f"{name}: cannot be opened")
    (folder / name).unlink()
    (folder / name).mkdir()
    fails(folder, f"{name}: is not a regular file")
    (folder / name).rmdir()
    os.mkfifo(folder / name)
    fails(folder, f"{name}: is not a regular file")


def test_linked_folders_inside_raise(folder: Path, tmp_path: Path) -> None:
    (folder / "kernels").rename(tmp_path / "elsewhere")
    (folder / "kernels").symlink_to(tmp_path / "elsewhere")
    fails(folder, "host.so: cannot be opened")


def test_folders_without_an_artifact_raise(tmp_path: Path) -> None:
    fails(tmp_path / "nothing", "is not a folder")
    fails(tmp_path, "manifest.json: cannot be opened")


# ---- the manifest ----


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": "other"}, "no artifact of picompile"),
        ({"schema": 5}, "schema is 5, and this runtime knows 4; update the runtime"),
        ({"schema": 1}, "schema is 1, and this runtime knows 4; compile the model again"),
        ({"abi": 2}, "abi is 2, and this runtime knows 1"),
        ({"schema": "1"}, "schema must be an integer"),
        ({"context": 41}, "disagree on context"),
        ({"chunk": 9}, "disagree on context, chunk or sequences"),
        ({"sequences": 2}, "disagree on context, chunk or sequences"),
        ({"files": {}}, "program.json is missing"),
        ({"code": {}}, "code must be a list, but is {}"),
        ({"code": []}, "code must be a list of one variant or more"),
        ({"code": [code_entry(), 3]}, r"code\[1\]: must be a JSON object"),
        ({"code": [code_entry(file="kernels/other.so")]}, "file must be one of the artifact's files"),
        ({"code": [code_entry(file="weights.safetensors")]}, "file must be one of the artifact's files"),
        ({"code": [code_entry() | {"features": "avx2"}]}, "features must be a list of texts"),
    ],
)
def test_wrong_manifests_raise(make_artifact: Callable[..., Path], change: dict[str, Any], match: str) -> None:
    fails(make_artifact(manifest=change), match)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/passwd", "a/../../b", "a//b", ".hidden", "", "a/", "a\\b", "manifest.json", "a\0b"]
)
def test_files_outside_of_the_folder_raise(folder: Path, name: str) -> None:
    change_json(folder / "manifest.json", lambda data: data["files"].update({name: {"bytes": 1, "sha256": "0" * 64}}))
    fails(folder, "is not the name of a file inside the artifact")


def test_a_manifest_that_is_no_json_raises(folder: Path) -> None:
    for text in (b"\xff\xfe", b"[]", b'{"a": NaN', b"[" * 100_000, b"null", b"\0" * 100):
        (folder / "manifest.json").write_bytes(text)
        fails(folder, "manifest.json: (is not valid JSON|must be a JSON object)")


def test_errors_are_one_line_whatever_the_names(make_artifact: Callable[..., Path]) -> None:
    fails(make_artifact(program={"state": {"k\n\x1b[31m": {"dtype": 3}}}), r"state: k\?\?\[31m: dtype must be")


# ---- the program ----


def program_with(change: Callable[[dict[str, Any]], Any], sequences: int = 1) -> dict[str, Any]:
    program = toy_program(make_toy(), 40, 8, sequences)
    change(program)
    return program


def set_at(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Sets the value that comes last at the keys before it."""

    def change(program: Any) -> None:
        *keys, last, value = path
        for key in keys:
            program = program[key]
        program[last] = value

    return change


DECODE = ("functions", "decode", 0, "args")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_at("schema", 1), "schema must be 3"),
        (set_at("arena_bytes", 64), "offset must be a multiple of 64"),
        (set_at("arena_bytes", -64), "arena_bytes must be an integer"),
        (set_at("buffers", "x", "offset", 2**40), "offset must be a multiple of 64 such that"),
        (set_at("buffers", "x", "offset", 4), "offset must be a multiple of 64"),
        (set_at("buffers", "x", "offset", -64), "offset must be an integer from 0"),
        (set_at("buffers", "x", "offset", 0), "x overlaps step"),
        (set_at("buffers", "x", "shape", [2**30, 2**30]), "shape must be a shape of at most"),
        (set_at("buffers", "x", "dtype", "object"), "dtype must be one of"),
        (set_at("buffers", "step", "shape", [4]), r"step must be int32 \[8\]"),
        (set_at("buffers", "tokens", "dtype", "float32"), r"tokens must be int32 \[8\]"),
        (set_at("buffers", "logits", "shape", [1, 49]), r"logits must be float32 \[1, 50\]"),
        (set_at("ffn", 0, "stats_row", 2), "stats_row lies outside"),
        (set_at("ffn", 0, "kept_rows", 2), "kept_rows must be an integer from 0 to 1"),
        (lambda program: program["buffers"].pop("logits.score"), "'logits.score'"),
        (lambda program: program["buffers"].pop("step"), "'step'"),
        (set_at("buffers", "positions", "shape", [9]), r"positions must be int32 \[8\]"),
        (set_at("vocab", 51), r"logits must be float32 \[1, 51\]"),
        (set_at("logits", "score", "logits"), r"logits must be float32 \[8, 50\]"),
        (set_at("logits", {}), "decode must be a text, but is missing"),
        (set_at("functions", "decode", "x"), "decode must be a list"),
        (lambda program: program["functions"].pop("score"), "score must be a list, but is missing"),
        (set_at(*DECODE, 1, {"buffer": "nothing"}), r"args\[1\]: buffer must be the name of one that exists"),
        (set_at(*DECODE, 1, {"weight": "x"}), "weight must be the name of one that exists"),
        (set_at(*DECODE, 1, {"state": "x"}), "state must be the name of one that exists"),
        (set_at(*DECODE, 1, {}), "must name one buffer, state or weight"),
        (set_at(*DECODE, 1, {"buffer": "x", "weight": "head"}), "must name one buffer, state or weight"),
        (set_at(*DECODE, 2, {"weight": "table", "shape": [51, 16]}), "is not inside of table"),
        (set_at(*DECODE, 2, {"weight": "table", "offset": 64}), "is not inside of table"),
        (set_at(*DECODE, 2, {"weight": "table", "offset": 2, "shape": [1, 1]}), "is not inside of table"),
        (set_at(*DECODE, 2, {"weight": "table", "offset": -64, "shape": [1, 16]}), "offset must be an integer"),
        (set_at(*DECODE, 2, {"weight": "table", "dtype": "int64"}), "is not inside of table"),
        (set_at(*DECODE, 2, {"weight": "table", "shape": [49, 16]}), "the table has fewer than 50 rows"),
        (set_at("state", "k.0", "shape", [1, 1, 39, 16]), r"k.0 must be \[1, kv_heads, 40, head_dim\]"),
        (set_at("state", "k.0", "shape", [1, 40, 16]), "k.0 must be"),
        (set_at("sequences", 0), "sequences must be an integer from 1 to 256"),
        (set_at("sequences", 2), "batch must be a list, but is missing"),
        (set_at("functions", "decode", 0, "kernel", "no_such_kernel"), "no kernel called 'no_such_kernel'"),
        (set_at("functions", "decode", 0, "kernel", "toy_embed\0"), "no kernel called"),
        (set_at("context", 0), "context must be an integer from 1"),
        (set_at("chunk", 2**30), "chunk must be an integer from 1"),
    ],
)
def test_wrong_programs_raise(make_artifact: Callable[..., Path], change: Callable[[Any], Any], match: str) -> None:
    folder = make_artifact()
    (folder / "program.json").write_text(json.dumps(program_with(change)))
    write_manifest(folder)
    fails(folder, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_at("sequences", 257), "sequences must be an integer from 1 to 256"),
        (set_at("sequences", 2), r"logits.batch must be float32 \[2, 50\]"),
        (set_at("state", "k.0", "shape", [1, 3, 40, 16]), r"k.0 must be \[3, kv_heads, 40, head_dim\]"),
        (set_at("state", "k.0", "shape", [3, 1, 41, 16]), "k.0 must be"),
        (set_at("state", "k.0", "shape", [3, 1, 40]), "k.0 must be"),
        (set_at("state", "k.0", "shape", [3, 1, 40, 16, 1]), "k.0 must be"),
        (lambda program: program["functions"].pop("batch"), "batch must be a list, but is missing"),
        (lambda program: program["logits"].pop("batch"), "batch must be a text, but is missing"),
        (set_at("logits", "batch", "logits"), r"logits must be float32 \[3, 50\]"),
        (lambda program: program["buffers"].pop("slots"), "'slots'"),
        (set_at("buffers", "slots", "dtype", "int64"), r"slots must be int32 \[8\]"),
        (set_at("buffers", "slots", "shape", [3]), r"slots must be int32 \[8\]"),
        (set_at("buffers", "stats.batch", "shape", [3, 2]), r"stats.batch must be int64 \[2, 2\]"),
        (
            lambda program: set_at("buffers", "x", "offset", program["buffers"]["slots"]["offset"])(program),
            "overlaps slots",
        ),
        (
            lambda program: set_at("buffers", "x", "offset", program["buffers"]["stats.batch"]["offset"])(program),
            "overlaps stats.batch",
        ),
        (set_at("functions", "batch", 0, "args", 2, {"weight": "table", "shape": [49, 16]}), "fewer than 50 rows"),
        (set_at("functions", "batch", 2, "kernel", "no_such_kernel"), "no kernel called 'no_such_kernel'"),
    ],
)
def test_wrong_programs_for_several_sequences_raise(
    make_artifact: Callable[..., Path], change: Callable[[Any], Any], match: str
) -> None:
    folder = make_artifact(sequences=3)
    (folder / "program.json").write_text(json.dumps(program_with(change, 3)))
    write_manifest(folder, changes={"sequences": 3})
    fails(folder, match)


def test_more_sequences_than_tokens_in_a_chunk(make_artifact: Callable[..., Path]) -> None:
    """The inputs have room for either."""
    folder = make_artifact(sequences=20)
    load(folder).close()
    change = set_at("buffers", "tokens", "shape", [21])
    (folder / "program.json").write_text(json.dumps(program_with(change, 20)))
    write_manifest(folder, changes={"sequences": 20})
    fails(folder, r"tokens must be int32 \[20\]")


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside of JSON data."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield (*path, key)
        if isinstance(value, dict | list):
            yield from places(value, (*path, key))


@pytest.mark.parametrize("name", ["program.json", "manifest.json"])
def test_any_wrong_value_is_an_error_or_harmless(folder: Path, name: str) -> None:
    """Whatever one value of the file is replaced by: it opens, or one of the errors meant for users is raised."""
    original = json.loads((folder / name).read_text())
    seed = random.Random(name)
    opened = 0
    found = list(places(original))
    for path in seed.sample(found, min(60, len(found))):
        for value in seed.sample(WEIRD, 3):
            data = copy.deepcopy(original)
            set_at(*path, value)(data)
            (folder / name).write_text(json.dumps(data))
            if name == "program.json":
                write_manifest(folder)
            try:
                load(folder).close()
                opened += 1
            except (ArtifactError, MachineError, DoesNotFitError) as error:
                assert "\n" not in str(error)
    assert opened < 150


def test_a_cache_larger_than_the_machine_does_not_fit(make_artifact: Callable[..., Path]) -> None:
    state = {"k.0": {"dtype": "float32", "shape": [1, 2**15, 2**24, 16]}}
    folder = make_artifact(program={"context": 2**24, "state": state}, manifest={"context": 2**24})
    with pytest.raises(DoesNotFitError, match=r"cache for 16777216 tokens needs 32768.00 GiB .* has .*--context"):
        load(folder)


def test_caches_that_fit_only_one_by_one_do_not_fit(make_artifact: Callable[..., Path]) -> None:
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    one = {"dtype": "float32", "shape": [3, 1, 40, machine_bytes // 2000]}  # a quarter of the memory
    folder = make_artifact(sequences=3, program={"state": {f"{side}.0": one for side in "kvwxy"}})
    program = json.loads((folder / "program.json").read_text())
    with pytest.raises(DoesNotFitError, match=r"a cache for 3 sequences of 40 tokens needs .*\(--sequences\)"):
        load(folder)
    assert 4 * 3 * 40 * program["state"]["k.0"]["shape"][-1] < machine_bytes / 4


# ---- weights ----


def header_with(change: Callable[[dict[str, Any]], Any]) -> bytes:
    toy = make_toy()
    tensors = {"table": toy.table, "head": toy.head, "script": toy.script, "neurons": np.zeros((32, 16), np.float32)}
    data = safetensors(tensors)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_at("table", "data_offsets", [0, 2**40]), "the place of 3200 bytes"),
        (set_at("table", "data_offsets", [64, 3200]), "the place of 3200 bytes"),
        (set_at("table", "data_offsets", [2**40, 2**40 + 3200]), "the place of 3200 bytes"),
        (set_at("table", "data_offsets", [-64, 3136]), "two offsets"),
        (set_at("table", "data_offsets", [32, 3232]), "no multiple of 64"),
        (set_at("table", "data_offsets", [True, 3200]), "two offsets"),
        (set_at("table", "dtype", "F99"), "dtype must be one of"),
        (set_at("table", "shape", [2**40, 2**40]), "shape must be"),
        (set_at("table", 3), "must be a JSON object"),
        (lambda header: header.pop("head"), "weight must be the name of one that exists, but is 'head'"),
    ],
)
def test_wrong_weights_headers_raise(
    make_artifact: Callable[..., Path], change: Callable[[Any], Any], match: str
) -> None:
    fails(make_artifact(weights=header_with(change)), match)


@pytest.mark.parametrize("data", [b"", b"1234567", b"\xff" * 8, (2**32).to_bytes(8, "little") + b"{}", bytes(64)])
def test_weights_files_that_are_no_safetensors_raise(make_artifact: Callable[..., Path], data: bytes) -> None:
    fails(make_artifact(weights=data), "weights.safetensors: (is empty|is not a safetensors file|is not valid JSON)")


# ---- stamps ----


def test_weights_are_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    original = artifact.hash_file

    def record(descriptor: int, entry: Any, name: str, progress: Any) -> str:
        hashed.append(name)
        return original(descriptor, entry, name, progress)

    def opened() -> list[str]:
        hashed.clear()
        load(folder).close()
        return sorted(hashed)

    monkeypatch.setattr(artifact, "hash_file", record)
    both = ["kernels/host.so", "weights.safetensors"]
    assert opened() == both
    assert opened() == ["kernels/host.so"]
    os.utime(folder / "weights.safetensors")
    assert opened() == both
    change_json(folder / "manifest.json", lambda data: data.update(note="another manifest for the same files"))
    assert opened() == both
    hashed.clear()
    verify(folder)
    assert sorted(hashed) == both


def test_weights_changed_after_they_were_verified_are_found(folder: Path) -> None:
    """Even with size and time of modification as they were."""
    path = folder / "weights.safetensors"
    load(folder).close()
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    fails(folder, "was changed")


def test_a_cache_that_cannot_be_written_is_no_obstacle(folder: Path, cache_home: Path) -> None:
    cache_home.write_text("a file, where a folder should be")
    for _ in range(2):
        load(folder).close()


# ---- threads ----


def test_number_of_threads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PICOMPILE_THREADS", raising=False)
    assert 1 <= machine.default_threads() <= len(os.sched_getaffinity(0))
    monkeypatch.setenv("PICOMPILE_THREADS", "3")
    with load(folder) as engine:
        assert engine.threads == 3
    with load(folder, threads=5) as engine:
        assert engine.threads == 5
    for wrong in ("0", "257", "-1", "two", "2.0"):
        monkeypatch.setenv("PICOMPILE_THREADS", wrong)
        with pytest.raises(RequestError, match=r"(PICOMPILE_THREADS|number of threads) must be .*from 1 to 256"):
            load(folder)
    for count in (0, -1, 257):
        with pytest.raises(RequestError, match="number of threads"):
            load(folder, threads=count)


def test_no_descriptor_is_left_open(folder: Path) -> None:
    load(folder).close()  # the library's own stays
    before = descriptors()
    for _ in range(5):
        load(folder).close()
    (folder / "program.json").write_text("{}")
    for _ in range(5):
        fails(folder, "program.json: has 2 bytes")
    assert descriptors() <= before


# ---- imports ----


def test_import_is_quick_and_imports_no_compiler() -> None:
    """In processor time, since other tests may be running."""
    script = """
import sys, time
start = time.process_time()
import picompile_runtime
seconds = time.process_time() - start
heavy = {"torch", "tvm", "tvm_ffi", "transformers", "tokenizers", "jinja2", "picompile"} & set(sys.modules)
sys.exit(f"{heavy}, {seconds} s" if heavy or seconds > 0.5 else 0)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
