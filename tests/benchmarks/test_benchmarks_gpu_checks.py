"""The model checks of the pack that gpu_pack.py writes, on the stand-in for the GPU: all are right, for a right reason.

Their kernels run in the emulation, so a check that fails here would fail on any GPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.fake_cuda.fixtures import fake_cuda, fake_library
from helpers.gpu_packs import BENCHMARKS, emulated_kernels, stand_in
from helpers.support import BuildOnce

sys.path.insert(0, str(BENCHMARKS))

import _gpu_engines
import gpu_pack
from _gpu_eager import EagerModel
from _gpu_engines import check_model
from _gpu_prepared import prepared

from picompile_runtime import open_artifact

pytestmark = pytest.mark.slow("runs the models of a pack in the emulation")

__all__ = ["fake_cuda", "fake_library"]

VARIANTS = [(quant, variant) for quant in ("f16", "q8", "q4") for variant in ("hybrid", "gpu")]


def _pack(folder: Path) -> None:
    folder.mkdir()
    entries = {"checks": list(gpu_pack.checks(gpu_pack.arguments(["-o", str(folder)])))}
    (folder / "pack.json").write_text(json.dumps(entries))
    emulated_kernels(folder)


@pytest.fixture(scope="session")
def checks(build_once: BuildOnce) -> Path:
    """The folder of a pack of the model checks alone. Tests must not change it."""
    return build_once("gpu-checks", _pack)


def _entry(checks: Path, quant: str, variant: str) -> dict[str, Any]:
    entries = json.loads((checks / "pack.json").read_text())["checks"]
    (entry,) = (each for each in entries if (each["quant"], each["variant"]) == (quant, variant))
    return dict(entry)


@pytest.fixture
def emulated(checks: Path, fake_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pack, with the stand-in in the place of the driver."""
    for name, value in stand_in(checks).items():
        monkeypatch.setenv(name, value)
    return checks


@pytest.mark.parametrize(("quant", "variant"), VARIANTS)
def test_a_check_is_right(quant: str, variant: str, emulated: Path, tmp_path: Path) -> None:
    row = check_model(emulated, tmp_path / "work", _entry(emulated, quant, variant), 1)
    assert row["is_right"] and row["limit"] == 1e-3
    # Half of the limit is left for what a GPU does otherwise than the emulation: the order of its sums.
    assert row["error"] < 5e-4
    assert row["tokens"]["same"] == row["tokens"]["decided"] > 10


def test_no_predictor_decides_by_rounding(checks: Path, tmp_path: Path) -> None:
    """Most random tokens have a logit that is nearer to its threshold, so the choice does something."""
    entry = _entry(checks, "q4", "hybrid")
    with prepared(checks / entry["file"], tmp_path / "work", active=0.2, skew=True, added=0.05) as (folder, _):
        artifact = open_artifact(folder)
        eager = EagerModel(artifact, entry)
        drawn = eager.draw(np.random.default_rng(5), 3, 4, _gpu_engines.MARGIN)
        eager.logits(drawn, 3)
        assert eager.nearest[3:].min() > _gpu_engines.MARGIN
        eager.logits(np.random.default_rng(5).integers(0, 300, 30).tolist(), 3)
        assert eager.nearest[3:].min() < _gpu_engines.MARGIN / 10
        artifact.close()


@pytest.mark.parametrize("fault", ["rope", "eps", "head"])
def test_another_model_is_found(fault: str, emulated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the engine turned or normalized otherwise; and a head that is unpacked in the format of blocks."""
    entry = _entry(emulated, "q4", "gpu")
    if fault == "rope":
        entry |= {"shape": entry["shape"] | {"rope_theta": 9000.0}}
    elif fault == "eps":
        entry |= {"shape": entry["shape"] | {"eps": 1e-2}}
    else:
        unpacked = EagerModel._unpacked

        def as_blocks(self: EagerModel, name: str, columns: int) -> Any:
            self._formats["lm_head.weight"] = "q4"
            return unpacked(self, name, columns)

        monkeypatch.setattr(EagerModel, "_unpacked", as_blocks)
    row = check_model(emulated, tmp_path / "work", entry, 1)
    assert not row["is_right"] and row["error"] > 1e-3
