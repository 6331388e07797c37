"""A share of the attack on one path by two writers: see replacements.py."""

import time
from pathlib import Path

import pytest
from replacements import attack

from helpers.support import BuildOnce, compile_for_test

pytestmark = pytest.mark.slow("lets two writers replace one path again and again")


@pytest.mark.parametrize("plain", [False, True], ids=["exchange", "two renamings"])
def test_two_writers_and_a_reader(
    plain: bool, tiny_artifact: Path, tiny_model: Path, build_once: BuildOnce, tmp_path: Path
) -> None:
    other = build_once("tiny-q4", lambda folder: compile_for_test(tiny_model, folder, quant="q4", context=64))
    report = attack((tiny_artifact, other), tmp_path, 30, time.monotonic() + 600, 0, plain)
    assert report.failures == []
    assert report.replacements == 60
    assert report.reads.total() > 0
