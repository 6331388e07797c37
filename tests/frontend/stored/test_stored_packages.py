"""Matrices that compressed-tensors and bitsandbytes themselves quantize and pack, against what they make of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.support import ROOT
from picompile.frontend.checkpoint import read_headers
from picompile.frontend.model_file import read_config
from picompile.frontend.stored import StoredMatrices, find_method

_PACKAGES = ("bitsandbytes==0.50.2", "compressed-tensors==0.20.0")
# What they import besides torch and transformers, which the environment has.
_NEEDED = ("pydantic>=2", "loguru")


@pytest.mark.slow("downloads packages of 50 MB")
def test_what_the_packages_themselves_write(tmp_path: Path) -> None:
    packages, written = tmp_path / "packages", tmp_path / "written"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages)]
    subprocess.run([*install, *_NEEDED], check=True)
    subprocess.run([*install, "--no-deps", *_PACKAGES], check=True)
    # Behind what is installed, so that torch and transformers are the environment's.
    program = f"import sys; sys.path.append({str(packages)!r}); from helpers.package_writers import main; "
    program += f"from pathlib import Path; main(Path({str(written)!r}))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)
    folders = sorted(written.iterdir())
    assert len(folders) == 15
    for folder in folders:
        method = find_method(read_config(folder))
        assert method is not None
        found = StoredMatrices(method, read_headers(folder)).load("up.weight")
        expected = load_file(folder / "expected.safetensors")["up.weight"]
        # LLM.int8() multiplies by 1 / 127.
        rtol = 2**-22 if folder.name == "int8" else 0
        torch.testing.assert_close(found, expected, rtol=rtol, atol=0, msg=folder.name)
