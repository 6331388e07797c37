"""A process that loads artifact after artifact keeps nothing of those before, whether they were closed or collected."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from helpers.toys.toy_artifact import make_toy, reference_logits, write_artifact, write_manifest
from helpers.toys.toy_two_sides import build_hybrid_library, write_hybrid
from picompile_runtime import ArtifactError, Engine, load
from picompile_runtime.devices.cpu.native import HostLibrary

TOY = make_toy()
IDS = list(range(9))


def held_now() -> tuple[int, int, int]:
    """The threads, descriptors and mappings that this process holds."""
    gc.collect()
    threads, descriptors = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return threads, descriptors, len(Path("/proc/self/maps").read_text().splitlines())


# Mapped before the test began: libraries that cannot end their threads stay, those of other modules' tests too.
OTHERS: set[str] = set()


def libraries() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if "/kernels/" in line and line not in OTHERS]


@pytest.fixture(autouse=True)
def _note_others() -> None:
    OTHERS.clear()
    OTHERS.update(libraries())


@pytest.fixture(scope="module")
def hybrid_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hybrid_library(tmp_path_factory.mktemp("hybrid") / "host.so")


def use(engine: Engine) -> None:
    np.testing.assert_allclose(engine.prefill(IDS), reference_logits(TOY, IDS)[-1], rtol=1e-4, atol=1e-4)
    engine.decode(1)


def load_many(first: Path, closes: bool) -> None:
    """Load 30 copies of an artifact, one after the other, and check what the process holds at the end."""
    held = []
    for number in range(1, 31):
        folder = first.with_name(str(number))
        shutil.copytree(first, folder)  # files of its own, and so libraries of its own
        engine = load(folder, threads=2)
        use(engine)
        if closes:
            engine.close()
        del engine
        shutil.rmtree(folder)
        if number in (5, 30):
            held.append(held_now())
    assert not libraries()
    (threads, descriptors, maps), late = held
    assert late[0] <= threads and late[1] <= descriptors, held
    assert late[2] <= maps + 3, held  # of Python's own memory


@pytest.mark.slow("loads artifacts again and again")
@pytest.mark.parametrize(("kind", "closes"), [("host", False), ("hybrid", True), ("hybrid", False)])
def test_loading_many_artifacts_leaks_nothing(
    kind: str, closes: bool, tmp_path: Path, library: Path, hybrid_library: Path
) -> None:
    """Whether engines are closed or collected."""
    write = write_artifact if kind == "host" else write_hybrid
    first = write(tmp_path / "0", library if kind == "host" else hybrid_library, TOY)
    # In a process of its own: what other tests have left in this one, threads among them, opens files at any time.
    program = f"from pathlib import Path\nfrom {__name__} import load_many\nload_many(Path({str(first)!r}), {closes})"
    # This module and its helpers are found where this process finds them.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_closed_engine_that_is_kept_has_given_its_library_back(tmp_path: Path, library: Path) -> None:
    """Closing it twice closes no file that others have opened since."""
    engine = load(write_artifact(tmp_path / "kept", library, TOY), threads=3)
    use(engine)
    assert libraries()
    engine.close()
    assert not libraries()
    files = [(tmp_path / str(number)).open("w") for number in range(4)]
    engine.close()
    for file in files:
        os.fstat(file.fileno())
        file.close()


def test_an_artifact_is_loaded_again_after_it_was_unloaded(tmp_path: Path, library: Path) -> None:
    folders = [write_artifact(tmp_path / name, library, TOY) for name in "ab"]
    for threads in (3, 1, 2) * 3:
        with load(folders[0], threads=threads) as engine:
            use(engine)
        assert not libraries()

    def work(number: int) -> None:
        for turn in range(10):
            engine = load(folders[(number + turn) % 2], threads=2)
            use(engine)
            if turn % 3:
                engine.close()

    with ThreadPoolExecutor(3) as threads_that_load:
        list(threads_that_load.map(work, range(3)))
    gc.collect()
    assert not libraries()


def test_a_library_lives_as_long_as_lists_of_its_calls(tmp_path: Path, library: Path) -> None:
    path = tmp_path / "host.so"
    shutil.copyfile(library, path)
    out = np.zeros(100, np.int32)
    calls = HostLibrary(path).bind([("pool_fill", [out])])
    HostLibrary(path).run(calls, 2)
    assert (out > 0).all()


def test_an_older_library_that_cannot_end_its_threads_stays(tmp_path: Path) -> None:
    """Nor can it exchange flags with a GPU, or copy for one."""
    source, path = "int pi_run(void) { return -1; } int pi_last_error(void) { return 0; }", tmp_path / "old.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", path], input=source, text=True, check=True)
    addresses = set()
    for _ in range(3):
        host = HostLibrary(path)
        assert not host.has_ping_pong and host.copy_part is None
        addresses.add(ctypes.cast(host._run, ctypes.c_void_p).value)
        host.close()
    assert len(addresses) == 1


def test_code_overwritten_in_place_raises(tmp_path: Path, library: Path) -> None:
    """`cp -r` onto an artifact does that: the file stays the same, and its content changes."""
    folder = write_artifact(tmp_path / "inplace", library, TOY)
    engine = load(folder, threads=1)
    code = folder / "kernels" / "host.so"
    with code.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"\0" * 64)  # behind all that is mapped
    write_manifest(folder)
    with pytest.raises(ArtifactError, match=r"host.so: the file was overwritten while an engine uses it; close"):
        load(folder)
    use(engine)
    engine.close()
    with load(folder) as again:
        use(again)


def test_an_engine_that_is_never_closed_does_not_disturb_the_end_of_the_process(tmp_path: Path, library: Path) -> None:
    program = "from sys import argv; from picompile_runtime import load; load(argv[1]).close(); kept = load(argv[1])"
    folder = write_artifact(tmp_path / "kept", library, TOY)
    subprocess.run([sys.executable, "-c", f"{program}; kept.prefill([1])", folder], check=True, timeout=60)
