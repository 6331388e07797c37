"""Commands that install what is missing name packages, which pip finds wherever picompile came from."""

import sys
from pathlib import Path

import pytest

from picompile_passes.extras import EXTRAS, install_command, install_extra


def test_packages_are_quoted() -> None:
    assert install_command("a", "b>=1,<2") == "pip install a 'b>=1,<2'"
    assert install_extra("report") == "pip install 'matplotlib>=3.9'"
    assert all(install_extra(extra).startswith("pip install ") for extra in EXTRAS)


def test_pipx_has_a_command_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert install_command("a") == "pip install a"
    (tmp_path / "pipx_metadata.json").touch()
    assert install_command("a") == "pipx inject picompile a"
