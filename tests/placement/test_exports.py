"""The package's exports resolve, whatever was imported before."""

import subprocess
import sys

import pytest

import picompile.placement


@pytest.mark.parametrize("name", picompile.placement.__all__)
def test_exported_names(name: str) -> None:
    found = getattr(picompile.placement, name)
    assert callable(found)
    assert found.__name__ == name


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = picompile.placement.nothing_such


def test_a_machine_needs_no_solver() -> None:
    code = (
        "import sys; from picompile.placement import machine_of; print(sorted({'highspy', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "[]"
