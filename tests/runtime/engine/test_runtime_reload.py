"""A process that loads artifact after artifact keeps nothing of those before, whether they were closed or collected."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from helpers.toys.toy_artifact import make_toy, reference_logits, write_artifact, write_manifest
from helpers.toys.toy_two_sides import build_hybrid_library, write_hybrid
from picompile_runtime import ArtifactError, Engine, load
from picompile_runtime.devices.cpu.native import HostLibrary

TOY = make_toy()
IDS = list(range(9))


@dataclass(frozen=True)
class Held:
    """The system's resources that this process holds."""

    threads: int
    descriptors: int
    maps: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        folders = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
        return cls(*folders, len(Path("/proc/self/maps").read_text().splitlines()))


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
    """Load 40 copies of an artifact, one after the other, and check what the process holds at the end."""
    held = []
    for number in range(1, 41):
        folder = first.with_name(str(number))
        shutil.copytree(first, folder)  # files of its own, and so libraries of its own
        engine = load(folder, threads=2)
        use(engine)
        if closes:
            engine.close()
        del engine
        shutil.rmtree(folder)
        held.append(Held.now())
    assert not libraries()
    assert held[-1].threads <= held[4].threads and held[-1].descriptors <= held[4].descriptors, held
    assert held[-1].maps <= held[4].maps + 3, held  # of Python's own memory


@pytest.mark.slow("loads artifacts again and again")
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "collected"])
@pytest.mark.parametrize("kind", ["host", "hybrid"])
def test_loading_many_artifacts_leaks_nothing(
    kind: str, closes: bool, tmp_path: Path, library: Path, hybrid_library: Path
) -> None:
    first = (
        write_artifact(tmp_path / "0", library, TOY)
        if kind == "host"
        else write_hybrid(tmp_path / "0", hybrid_library, TOY)
    )
    # In a process of its own: what other tests have left in this one, threads among them, opens files at any time.
    program = f"from pathlib import Path\nfrom {__name__} import load_many\nload_many(Path({str(first)!r}), {closes})"
    # This module and its helpers are found where this process finds them.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_closed_engine_that_is_kept_has_given_its_library_back(tmp_path: Path, library: Path) -> None:
    engine = load(write_artifact(tmp_path / "kept", library, TOY), threads=3)
    use(engine)
    assert libraries()
    engine.close()
    assert not libraries()
    engine.close()


def test_an_artifact_is_loaded_again_after_it_was_unloaded(tmp_path: Path, library: Path) -> None:
    folder = write_artifact(tmp_path / "again", library, TOY)
    for threads in (3, 1, 2) * 5:
        with load(folder, threads=threads) as engine:
            use(engine)
        assert not libraries()


def test_engines_share_a_library_until_the_last_is_closed(tmp_path: Path, library: Path) -> None:
    folder = write_artifact(tmp_path / "shared", library, TOY)
    engines = [load(folder, threads=2) for _ in range(3)]
    count = len(libraries())
    while engines:
        for engine in engines:
            engine.reset()
            use(engine)
        assert len(libraries()) == count
        engines.pop().close()
    assert not libraries()


def test_closing_twice_closes_no_file_of_others(tmp_path: Path, library: Path) -> None:
    engine = load(write_artifact(tmp_path / "twice", library, TOY))
    engine.close()
    files = [(tmp_path / str(number)).open("w") for number in range(4)]
    engine.close()
    for file in files:
        os.fstat(file.fileno())
        file.close()


def test_a_library_lives_as_long_as_lists_of_its_calls(tmp_path: Path, library: Path) -> None:
    path = tmp_path / "host.so"
    shutil.copyfile(library, path)
    out = np.zeros(100, np.int32)
    calls = HostLibrary(path).bind([("pool_fill", [out])])
    HostLibrary(path).run(calls, 2)
    assert (out > 0).all()


def test_several_threads_load_and_close(tmp_path: Path, library: Path) -> None:
    folders = [write_artifact(tmp_path / str(number), library, TOY) for number in range(2)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(25):
                engine = load(folders[(number + turn) % 2], threads=2)
                use(engine)
                if turn % 3:
                    engine.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert not failures and not libraries()


def test_an_older_library_that_cannot_end_its_threads_stays(tmp_path: Path) -> None:
    source, path = tmp_path / "old.c", tmp_path / "old.so"
    source.write_text("int pi_run(void) { return -1; } int pi_last_error(void) { return 0; }")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    address = {}
    for _ in range(3):
        host = HostLibrary(path)
        address[ctypes_address(host)] = True
        host.close()
    assert len(address) == 1


def ctypes_address(host: HostLibrary) -> int:
    return ctypes.cast(host._run, ctypes.c_void_p).value or 0


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


SCRIPT = """
import os, sys, warnings
warnings.simplefilter("ignore")
from picompile_runtime import load
for _ in range(3):
    with load(sys.argv[1], threads=2) as engine:
        engine.prefill([1, 2, 3])
    child = os.fork()
    if child == 0:
        with load(sys.argv[1], threads=2) as engine:
            engine.prefill([1, 2, 3])
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
kept = load(sys.argv[1], threads=2)
kept.prefill([1, 2, 3])
"""


def test_a_fork_behind_an_unloaded_library_and_the_end_of_the_process(tmp_path: Path, library: Path) -> None:
    """A library leaves no handler of forks behind, and an engine that is never closed does not disturb the exit."""
    folder = write_artifact(tmp_path / "forked", library, TOY)
    for _ in range(5):
        subprocess.run([sys.executable, "-c", SCRIPT, str(folder)], check=True, timeout=60)
