from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from helpers.damage import STRANGE, places, replaced
from helpers.descriptors import descriptors
from helpers.toys.toy_artifact import code_entry, make_toy, safetensors, set_at, toy_program, write_manifest
from picompile_runtime import ArtifactError, DoesNotFitError, MachineError, load, verify
from picompile_runtime.artifact import reader as artifact
from picompile_runtime.artifact.manifest import sealed

FILES = ("manifest.json", "program.json", "weights.safetensors", "kernels/host.so", "tokenizer.json")


@pytest.fixture
def folder(make_artifact: Callable[..., Path]) -> Path:
    return make_artifact(texts={"tokenizer.json": "{}"})


def fails(folder: Path, match: str, kind: type[Exception] = ArtifactError) -> None:
    """Opening and verifying both fail, with one line that names a file or folder of the artifact."""
    for use in (load, verify):
        with pytest.raises(kind, match=match) as caught:
            use(folder)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


# ---- whole artifacts ----


def test_a_whole_artifact_opens_and_verifies(make_artifact: Callable[..., Path]) -> None:
    defaults = '{"eos_token_id": [3, 4]}'
    folder = make_artifact(texts={"tokenizer.json": "{}", "generation_config.json": defaults})
    seen: list[tuple[str, int, int]] = []
    manifest = verify(folder, lambda name, done, size: seen.append((name, done, size)))
    assert manifest.model["name"] == "toy"
    whole = {name for name, done, size in seen if done == size}
    assert whole == {*FILES, "generation_config.json"} - {"manifest.json"}
    with load(folder) as engine:
        assert engine.context == 40
        assert engine.artifact.eos_token_ids == {0, 3, 4}


def test_weights_are_mapped_and_read_only_until_the_engine_is_closed(folder: Path) -> None:
    def maps() -> list[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [line.split()[1] for line in lines if str(folder / "weights") in line]

    with load(folder) as engine:
        assert maps() == ["r--s"]
        engine.prefill([1, 2])
    assert not maps()


# ---- damage ----


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_named(folder: Path, name: str, tmp_path: Path) -> None:
    path, data = folder / name, (folder / name).read_bytes()
    for position in random.Random(name).sample(range(len(data) * 8), min(15, len(data) * 8)):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        path.write_bytes(changed)
        fails(folder, "manifest.json: " if name == "manifest.json" else rf"{name}: was changed \(its sha256")
    for cut in (b"", data[:1], data[: len(data) // 2], data[:-1], data + b"\0", data + b" "):
        path.write_bytes(cut)
        fails(folder, f"{name}: (has .* bytes instead of|is not valid JSON|was changed)")
    path.write_bytes(data)
    load(folder).close()
    path.rename(tmp_path / "elsewhere")
    fails(folder, f"{name}: cannot be opened \\(No such file")
    path.symlink_to(path.name)
    fails(folder, f"{name}: cannot be opened .*links lead to each other")
    path.unlink()
    path.mkdir()
    fails(folder, f"{name}: is not a regular file")
    path.rmdir()
    os.mkfifo(path)
    fails(folder, f"{name}: is not a regular file")


def test_pointers_of_git_lfs_are_named(folder: Path) -> None:
    """As in a repository of artifacts that was cloned without its large files."""
    for name in ("weights.safetensors", "program.json", "manifest.json"):
        kept = (folder / name).read_bytes()
        (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 5\n")
        fails(folder, rf"{name}: is a Git LFS pointer, not the file itself; run `git lfs pull`")
        (folder / name).write_bytes(kept)


def test_folders_without_an_artifact_raise(folder: Path, tmp_path: Path) -> None:
    fails(tmp_path / "nothing", "is not a folder")
    fails(tmp_path, "manifest.json: cannot be opened")
    (folder / "kernels").rename(tmp_path / "elsewhere")
    fails(folder, "host.so: cannot be opened")


def test_files_may_be_links_as_in_a_hub_cache(folder: Path, tmp_path: Path) -> None:
    """Each file of a snapshot leads to a blob beside it; what it leads to is held to the manifest."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    for number, path in enumerate([path for path in folder.rglob("*") if path.is_file()]):
        link = snapshot / path.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        path.rename(blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    with load(snapshot) as engine:
        assert engine.artifact.folder == snapshot
    verify(snapshot)
    weights = (snapshot / "weights.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    fails(snapshot, "weights.safetensors: was changed")
    weights.unlink()
    fails(snapshot, r"weights.safetensors: cannot be opened \(No such file")


# ---- the manifest ----


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format": "other"}, "no artifact of picompile"),
        ({"schema": 5}, "schema is 5, and this runtime knows 4; update the runtime"),
        ({"schema": 1}, "schema is 1, and this runtime knows 4; compile the model again"),
        ({"abi": 2}, "abi is 2, and this runtime knows 1"),
        ({"context": 41}, "disagree on context"),
        ({"sequences": 2}, "disagree on context, chunk or sequences"),
        ({"files": {}}, "program.json is missing"),
        ({"code": []}, "code must be a list of one variant or more"),
        ({"code": [code_entry(), 3]}, r"code\[1\]: must be a JSON object"),
        ({"code": [code_entry(file="kernels/other.so")]}, "file must be one of the artifact's files"),
        ({"code": [code_entry(file="weights.safetensors")]}, "file must be one of the artifact's files"),
        ({"code": [code_entry() | {"features": "avx2"}]}, "features must be a list of texts"),
    ],
)
def test_wrong_manifests_raise(make_artifact: Callable[..., Path], change: dict[str, Any], match: str) -> None:
    fails(make_artifact(manifest=change), match)


def test_files_outside_of_the_folder_raise(folder: Path) -> None:
    whole = (folder / "manifest.json").read_bytes()
    for name in ("", "../outside", "/b", "a/../../b", "a//b", ".hidden", "a/", "a\\b", "manifest.json", "a\0b"):
        data = json.loads(whole)
        data["files"][name] = {"bytes": 1, "sha256": "0" * 64}
        (folder / "manifest.json").write_bytes(sealed(data))
        fails(folder, "is not the name of a file inside the artifact")
    for text in (b"\xff\xfe", b"[]", b'{"a": NaN', b"[" * 100_000, b"null", b"\0" * 100):
        (folder / "manifest.json").write_bytes(text)
        fails(folder, "manifest.json: (is not valid JSON|must be a JSON object)")


# ---- the program ----


def x_over(name: str) -> Callable[[Any], None]:
    """Puts the buffer x where another one lies."""
    return lambda program: set_at("buffers", "x", "offset", program["buffers"][name]["offset"])(program)


DECODE = ("functions", "decode", 0, "args")


WRONG_PROGRAMS = [
    (set_at("schema", 1), "schema must be 4"),
    (set_at("arena_bytes", 64), "offset must be a multiple of 64"),
    (set_at("buffers", "x", "offset", 4), "offset must be a multiple of 64"),
    (set_at("buffers", "x", "offset", -64), "offset must be an integer from 0"),
    (set_at("buffers", "x", "offset", 0), "x overlaps step"),
    (set_at("buffers", "x", "shape", [2**30, 2**30]), "shape must be a shape of at most"),
    (set_at("buffers", "x", "dtype", "object"), "dtype must be one of"),
    (set_at("buffers", "step", "shape", [4]), r"step must be int32 \[8\]"),
    (set_at("buffers", "tokens", "dtype", "float32"), r"tokens must be int32 \[8\]"),
    (set_at("ffn", 0, "stats_row", 2), "stats_row lies outside"),
    (set_at("ffn", 0, "kept_rows", 2), "kept_rows must be an integer from 0 to 1"),
    (lambda program: program["buffers"].pop("step"), "'step'"),
    (set_at("vocab", 51), r"logits must be float32 \[1, 51\]"),
    (set_at("logits", "score", "logits"), r"logits must be float32 \[8, 50\]"),
    (set_at("logits", {}), "decode must be a text, but is missing"),
    (set_at("functions", "decode", "x"), "decode must be a list"),
    (lambda program: program["functions"].pop("score"), "score must be a list, but is missing"),
    (set_at(*DECODE, 1, {"buffer": "nothing"}), r"args\[1\]: buffer must be the name of one that exists"),
    (set_at(*DECODE, 1, {"weight": "x"}), "weight must be the name of one that exists"),
    (set_at(*DECODE, 1, {"buffer": "x", "weight": "head"}), "must name one buffer, state or weight"),
    (set_at(*DECODE, 2, {"weight": "table", "shape": [51, 16]}), "is not inside of table"),
    (set_at(*DECODE, 2, {"weight": "table", "offset": 2, "shape": [1, 1]}), "is not inside of table"),
    (set_at(*DECODE, 2, {"weight": "table", "dtype": "int64"}), "is not inside of table"),
    (set_at("state", "k.0", "shape", [1, 39, 16]), "k.0 must have 40 rows, one for each position, in dimension 1"),
    (set_at("state", "k.0", "grows", 0), "k.0 must have 40 rows, one for each position, in dimension 0"),
    (set_at("state", "k.0", "grows", 2), "k.0: grows must be an integer from 0 to 1"),
    (lambda program: program["state"]["k.0"].pop("grows"), "k.0: grows must be .*, but is missing"),
    (set_at("state", "k.0", "kind", "eternal"), "k.0: kind must be one of positional, recurrent"),
    (set_at("state", "k.0", "shape", [40, 16]), "grows must be an integer from 0 to 0"),
    (set_at("state", {"k\n\x1b[31m": {"dtype": 3}}), r"state: k\?\?\[31m: dtype must be"),
    (set_at("sequences", 0), "sequences must be an integer from 1 to 256"),
    (set_at("sequences", 2), "batch must be a list, but is missing"),
    (set_at("functions", "decode", 0, "kernel", "no_such_kernel"), "no kernel called 'no_such_kernel'"),
    (set_at("context", 0), "context must be an integer from 1"),
]
WRONG_PROGRAMS_OF_THREE = [
    (set_at("sequences", 2), r"logits.batch must be float32 \[2, 50\]"),
    (lambda program: program["functions"].pop("batch"), "batch must be a list, but is missing"),
    (lambda program: program["logits"].pop("batch"), "batch must be a text, but is missing"),
    (set_at("buffers", "slots", "shape", [3]), r"slots must be int32 \[8\]"),
    (set_at("buffers", "stats.batch", "shape", [3, 2]), r"stats.batch must be int64 \[2, 2\]"),
    *((x_over(name), f"overlaps {name}") for name in ("slots", "stats.batch")),
]


@pytest.mark.parametrize(
    ("sequences", "change", "match"),
    [
        *((1, *wrong) for wrong in WRONG_PROGRAMS),
        *((3, *wrong) for wrong in WRONG_PROGRAMS_OF_THREE),
        # More sequences than tokens in a chunk: the inputs have room for either.
        (20, set_at("buffers", "tokens", "shape", [21]), r"tokens must be int32 \[20\]"),
    ],
)
def test_wrong_programs_raise(
    make_artifact: Callable[..., Path], sequences: int, change: Callable[[Any], Any], match: str
) -> None:
    program = toy_program(make_toy(), 40, 8, sequences)
    change(program)
    folder = make_artifact(sequences=sequences)
    load(folder).close()
    (folder / "program.json").write_text(json.dumps(program))
    write_manifest(folder, changes={"sequences": sequences})
    fails(folder, match)


@pytest.mark.parametrize("name", ["program.json", "manifest.json"])
def test_any_wrong_value_is_an_error_or_harmless(folder: Path, name: str) -> None:
    """Whatever one value of the file is replaced by: it opens, or one of the errors meant for users is raised."""
    original = json.loads((folder / name).read_text())
    seed, opened = random.Random(name), 0
    found = list(places(original))
    for path in seed.sample(found, min(60, len(found))):
        for value in seed.sample(STRANGE, 3):
            (folder / name).write_text(json.dumps(replaced(original, path, value)))
            if name == "program.json":
                write_manifest(folder)
            try:
                load(folder).close()
                opened += 1
            except (ArtifactError, MachineError, DoesNotFitError) as error:
                assert "\n" not in str(error)
    assert opened < 150


def test_a_cache_larger_than_the_machine_does_not_fit(make_artifact: Callable[..., Path]) -> None:
    """Nor do several, each of which would fit by itself."""
    state = {"k.0": {"dtype": "float32", "shape": [2**15, 2**24, 16], "layer": 0, "grows": 1}}
    folder = make_artifact(program={"context": 2**24, "state": state}, manifest={"context": 2**24})
    with pytest.raises(DoesNotFitError, match=r"cache for 16777216 tokens needs 32768.00 GiB .* has .*--context"):
        load(folder)
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    one = {"dtype": "float32", "shape": [1, 40, machine_bytes // 2000], "layer": 0, "grows": 1}
    assert 3 * 4 * np.prod(one["shape"]) < machine_bytes / 4
    folder = make_artifact("several", sequences=3, program={"state": {f"{side}.0": one for side in "kvwxy"}})
    with pytest.raises(DoesNotFitError, match=r"a cache for 3 sequences of 40 tokens needs .*\(--sequences\)"):
        load(folder)


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


NO_SAFETENSORS = "weights.safetensors: (is empty|is not a safetensors file|is not valid JSON)"


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        (header_with(set_at("table", "data_offsets", [0, 2**40])), "the place of 3200 bytes"),
        (header_with(set_at("table", "data_offsets", [64, 3200])), "the place of 3200 bytes"),
        (header_with(set_at("table", "data_offsets", [-64, 3136])), "two offsets"),
        (header_with(set_at("table", "data_offsets", [32, 3232])), "no multiple of 64"),
        (header_with(set_at("table", "dtype", "F99")), "dtype must be one of"),
        (header_with(set_at("table", "shape", [2**40, 2**40])), "shape must be"),
        (header_with(set_at("table", 3)), "must be a JSON object"),
        (header_with(lambda header: header.pop("head")), "weight must be the name of one that exists, but is 'head'"),
        *((data, NO_SAFETENSORS) for data in (b"", b"1234567", b"\xff" * 8, (2**32).to_bytes(8, "little") + b"{}")),
        (bytes(64), NO_SAFETENSORS),
    ],
    ids=range(13),
)
def test_wrong_weights_files_raise(make_artifact: Callable[..., Path], weights: bytes, match: str) -> None:
    fails(make_artifact(weights=weights), match)


# ---- stamps ----


def test_weights_are_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are changed, even with size and time of modification as they were."""
    hash_file = Mock(wraps=artifact.hash_file)
    monkeypatch.setattr(artifact, "hash_file", hash_file)

    def opened() -> list[str]:
        hash_file.reset_mock()
        load(folder).close()
        return sorted(call.args[2] for call in hash_file.call_args_list)

    path, both = folder / "weights.safetensors", ["kernels/host.so", "weights.safetensors"]
    assert opened() == both
    assert opened() == ["kernels/host.so"]
    os.utime(path)
    assert opened() == both
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_bytes(sealed({**manifest, "note": "another manifest for the same files"}))
    assert opened() == both
    hash_file.reset_mock()
    verify(folder)
    assert sorted(call.args[2] for call in hash_file.call_args_list) == both
    status, data = path.stat(), path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    fails(folder, "was changed")


def test_a_cache_that_cannot_be_written_is_no_obstacle(folder: Path, cache_home: Path) -> None:
    cache_home.write_text("a file, where a folder should be")
    for _ in range(2):
        load(folder).close()


def test_no_descriptor_is_left_open(folder: Path) -> None:
    load(folder).close()  # the library's own stays
    before = descriptors()
    for _ in range(3):
        load(folder).close()
    (folder / "program.json").write_text("{}")
    for _ in range(2):
        fails(folder, "program.json: has 2 bytes")
    assert descriptors() <= before
