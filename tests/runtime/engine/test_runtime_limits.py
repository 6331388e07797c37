"""Errors of the system while an artifact is loaded name their cause, and do not blame the artifact."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.toys.toy_artifact import make_toy
from picompile_runtime import ArtifactError, DoesNotFitError, PicompileRuntimeError, RequestError, load
from picompile_runtime.artifact.files import system_error, translate_system_errors
from picompile_runtime.devices.memory import in_units

LIMITED = """
import os, resource, sys
from picompile_runtime import PicompileRuntimeError, load
load(sys.argv[1], threads=2).close()
what, limits = sys.argv[2], range(int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
used = {"NOFILE": len(os.listdir("/proc/self/fd")), "AS": int(open("/proc/self/statm").read().split()[0]) * 4096}[what]
hard = resource.getrlimit(getattr(resource, f"RLIMIT_{what}"))[1]
seen = set()
for limit in limits:
    resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (used + limit, hard))
    try:
        load(sys.argv[1], threads=2).close()
    except PicompileRuntimeError as error:
        resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (hard, hard))
        assert "compile" not in str(error), str(error)
        seen.add(type(error).__name__)
        seen.add(str(error).partition("(")[2].partition(")")[0])
    else:
        seen.add("loaded")
resource.setrlimit(getattr(resource, f"RLIMIT_{what}"), (hard, hard))
print(sorted(seen))
load(sys.argv[1], threads=2).close()
"""


def limited(folder: Path, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder), *arguments], capture_output=True, text=True, timeout=100
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_too_few_descriptors_are_named_as_the_cause(make_artifact: Callable[..., Path]) -> None:
    """With each number of them there is one line that names the cause, until there are enough."""
    found = limited(make_artifact(toy=make_toy()), "NOFILE", "0", "20", "1")
    assert found == "['DoesNotFitError', 'Too many open files', 'loaded']"


def test_too_little_address_space_is_named_as_the_cause(make_artifact: Callable[..., Path]) -> None:
    found = limited(make_artifact(toy=make_toy()), "AS", "0", "40000000", "1000000")
    assert "'DoesNotFitError'" in found and "'loaded'" in found and "ArtifactError" not in found


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        ("EMFILE", DoesNotFitError, "ulimit -n"),
        ("ENFILE", DoesNotFitError, "this system cannot open more"),
        ("ENOMEM", DoesNotFitError, "too little memory"),
        ("EACCES", ArtifactError, "permissions"),
        ("EIO", ArtifactError, "disk may be failing"),
        ("ENOENT", ArtifactError, "copy or compile"),
        ("EBADF", ArtifactError, "copy or compile"),
    ],
)
def test_each_cause_has_its_own_message(code: str, kind: type[PicompileRuntimeError], says: str) -> None:
    import errno

    number = getattr(errno, code)
    with pytest.raises(kind, match=says) as caught, translate_system_errors("some/file"):
        raise OSError(number, os.strerror(number))
    assert str(caught.value).startswith(f"some/file: cannot be opened ({os.strerror(number)}); ")
    assert type(system_error("f", OSError(f"libx.so: {os.strerror(number)}"))) in (kind, ArtifactError)


def test_lack_of_memory_is_translated_and_other_errors_are_not() -> None:
    for error in (MemoryError(), RuntimeError("can't start new thread")):
        with pytest.raises(DoesNotFitError, match="cannot be loaded"), translate_system_errors("x"):
            raise error
    with pytest.raises(RuntimeError, match="other"), translate_system_errors("x"):
        raise RuntimeError("other")


def test_unreadable_folders_raise(make_artifact: Callable[..., Path]) -> None:
    if os.geteuid() == 0:
        pytest.skip("needs a user who is not root")
    folder = make_artifact()
    (folder / "program.json").chmod(0)
    with pytest.raises(ArtifactError, match=r"program.json: cannot be opened \(Permission denied\); change its perm"):
        load(folder)


def test_values_that_are_no_paths_raise() -> None:
    for path in (None, 5, ["a"], object(), "a\0b", b"a\0b"):
        with pytest.raises(RequestError, match="path"):
            load(path)  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match=r"File name too long\); give the folder") as caught:
        load("a" * 5000)
    assert len(str(caught.value)) < 2100
    for text in ("", "\ud800", "\udc80"):
        with pytest.raises(ArtifactError):
            load(text)


def test_different_sizes_have_different_texts() -> None:
    assert in_units(2**30, 3 * 2**30) == ("1.00 GiB", "3.00 GiB")
    assert in_units(75 * 2**20, 74 * 2**20) == ("75.0 MiB", "74.0 MiB")
    assert in_units(2**31, 2**31 + 2**20) == ("2.000 GiB", "2.001 GiB")
    assert in_units(2**20, 2**20 + 1) == ("1.000000 MiB", "1.000001 MiB")
    assert in_units(5, 5) == ("0.0 MiB", "0.0 MiB")
