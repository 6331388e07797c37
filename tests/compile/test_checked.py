"""The checks of a model, which are made while kernels are compiled, or before anything that takes long."""

from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from picompile.compile import compile_model
from picompile.compile.checked import ModelChecks, takes_long
from picompile.config import CompileOptions
from picompile.errors import UnsupportedModelError
from picompile.frontend.captured import Captured
from picompile.frontend.hf import load_model
from picompile.progress import NoProgress
from picompile_codegen.build.host_library import build_host_library
from picompile_codegen.build.isa import DEFAULT_ISA, ISAS, targeting
from picompile_codegen.cpu import write_kernel
from picompile_codegen.errors import BuildError
from picompile_codegen.specs import AddSpec

OPTIONS = CompileOptions(quant="q8", context=32, chunk=16)


def refusing(captured: Captured, calls: list[str]) -> Captured:
    def prove() -> None:
        calls.append("prove")
        raise UnsupportedModelError("the graph is another")

    return replace(captured, prove=prove)


@pytest.mark.parametrize("step", ["resolve", "lower_for", "make_room", "write_artifact"])
def test_what_is_wrong_with_the_model_is_said_first(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    calls: list[str] = []
    captured = refusing(load_model(tiny_model), calls)

    def fail(*_: Any, **__: Any) -> Any:
        raise BuildError(f"{step} failed")

    monkeypatch.setattr("picompile.compile.driver.load_model", lambda model, activation: captured)
    monkeypatch.setattr(f"picompile.compile.driver.{step}", fail)
    with pytest.raises(UnsupportedModelError, match="the graph is another"):
        compile_model(tiny_model, tmp_path / "artifact", OPTIONS)
    assert calls == ["prove"]
    assert not list(tmp_path.iterdir())


def test_checks_are_made_once(tiny_model: Path) -> None:
    calls: list[str] = []
    checks = ModelChecks(tiny_model, refusing(load_model(tiny_model), calls), OPTIONS, NoProgress())
    for _ in range(2):
        with pytest.raises(UnsupportedModelError):
            checks()
    assert calls == ["prove"]


def test_a_model_is_checked_before_what_takes_long() -> None:
    assert not takes_long(OPTIONS, "q8") and not takes_long(CompileOptions(), "stored")
    for options in ({"predictor": "learned"}, {"skip": 0.01}, {"target": "4090"}, {"calibration": ("text",)}):
        assert takes_long(CompileOptions(**options), "q4"), options  # type: ignore[arg-type]
    assert takes_long(CompileOptions(), "4bit") and takes_long(CompileOptions(quant="5.2bpw"), "5.2bpw")


def test_no_kernel_is_begun_once_a_build_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "picompile_codegen.build.host_library.kernel_object", lambda *_: pytest.fail("a kernel was compiled")
    )
    stop, isa = Event(), ISAS[DEFAULT_ISA]
    stop.set()
    with targeting(isa):
        kernel = write_kernel(AddSpec(64, 1))
    with pytest.raises(BuildError, match="stopped"):
        build_host_library([kernel], tmp_path / "library.so", isa, stop)
    assert not (tmp_path / "library.so").exists()
