"""A back end in a package of its own (tests/data/back_end), which prints its kernels instead of compiling them."""

import json
import re
from pathlib import Path

import pytest

from helpers.gpu_artifacts import gpu_model
from helpers.support import ROOT, Cli, compile_for_test
from picompile.errors import UsageError
from picompile_codegen.registry import BACK_ENDS
from picompile_passes.errors import RegistryError
from picompile_runtime import MachineError, load, verify

__all__ = ["gpu_model"]

POINTS = """[picompile.backends]
printing = printing:BACK_END

[picompile_runtime.devices]
printing = printing.runtime:KIND
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the package on the path, as pip would, and take it away again."""
    site = tmp_path / "site"
    (info := site / "printing-1.0.dist-info").mkdir(parents=True)
    (site / "printing").symlink_to(ROOT / "tests" / "data" / "back_end" / "printing")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: printing\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(BACK_ENDS, "_known", dict(BACK_ENDS._known))
    return info


def test_a_package_prints_the_kernels_of_a_model(installed: Path, gpu_model: Path, tmp_path: Path, cli: Cli) -> None:
    """Compiling, verifying and inspecting go through it; opening says what it is."""
    artifact = tmp_path / "artifact"
    sizes = {"quant": "f16", "context": 32, "chunk": 16, "hot": {0: range(1, 200, 3)}}
    compile_for_test(gpu_model, artifact, accelerator="printing", **sizes)
    program = json.loads((artifact / "program.json").read_text())
    called = {call["kernel"] for call in program["functions"]["decode"] if call.get("device")}
    printed = (artifact / "kernels" / "printed.txt").read_text()
    assert len(called) > 5
    assert all(f"def {kernel}(" in printed for kernel in called)
    accelerator = verify(artifact).accelerator
    assert accelerator is not None and accelerator.kind == "printing"
    assert re.search("accelerator +printing", cli("inspect", artifact).out)
    with pytest.raises(MachineError, match="kernels that were printed do not run"):
        load(artifact)


def test_names_of_back_ends_are_checked(installed: Path, tmp_path: Path) -> None:
    assert tuple(BACK_ENDS) == ("cpu", "cuda", "printing")
    with pytest.raises(UsageError, match="unknown accelerator 'tpu'; known are cpu, cuda, printing"):
        compile_for_test(tmp_path, tmp_path / "artifact", accelerator="tpu")
    (installed / "entry_points.txt").write_text("[picompile.backends]\ncuda = printing:BACK_END\n")
    with pytest.raises(RegistryError, match="two back ends are called cuda: one from picompile and printing:BACK_END"):
        list(BACK_ENDS)
