"""The layout of panels, in compiled code and in PyTorch."""

import pytest
import torch

from helpers.weight_formats import PANEL_FORMATS
from picompile_passes.formats import FORMATS, PANEL_ROWS, rounding_library
from picompile_passes.formats.panels import to_panels


@pytest.mark.parametrize("name", PANEL_FORMATS)
@pytest.mark.parametrize("columns", [32, 300, 1024])
def test_compiled_code_lays_out_what_pytorch_does(name: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, width = 5 * PANEL_ROWS, FORMATS[name].row_bytes(columns)
    packed = torch.randint(256, (rows, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(columns))
    found = to_panels(packed, name, columns)
    monkeypatch.setattr(rounding_library, "library", lambda: None)
    assert torch.equal(found, to_panels(packed, name, columns))
