"""A share of the attack on checkpoints: see checkpoints.py."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import mutated, refusal_fault, save_good_checkpoint

pytestmark = pytest.mark.slow("damages checkpoints at random; single faults have fast tests")

ATTACK = Path(__file__).with_name("checkpoints.py")
# Fixed, so that a failure in CI can be had again.
SEEDS = range(40)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A good checkpoint in one file, and one in several."""
    folder = tmp_path_factory.mktemp("good")
    save_good_checkpoint(folder / "whole")
    save_good_checkpoint(folder / "sharded", shard="20KB")
    return folder / "whole", folder / "sharded"


def test_mutated_checkpoints_are_refused_in_one_line_or_captured(
    originals: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The part of a compilation that reads the checkpoint, in this process; kernels are not made."""
    from picompile.cli.app import report

    wrong, refused = {}, 0
    for seed in SEEDS:
        folder = tmp_path / f"model-{seed}"
        name = mutated(*originals, folder, seed)
        try:
            _read(folder)
        except Exception as error:
            code, text = report(error, debug=False), capsys.readouterr().err
            refused += 1
            if fault := refusal_fault(code, text):
                wrong[seed] = f"{name}: {fault}: {text}"
        shutil.rmtree(folder, ignore_errors=True)
    assert wrong == {}
    assert refused >= len(SEEDS) // 2


def _read(folder: Path) -> None:
    """Everything that a compilation reads of a checkpoint."""
    from picompile.cli.checks import require_model_folder
    from picompile.frontend.checkpoint import fingerprint
    from picompile.frontend.hf import open_checkpoint
    from picompile.frontend.tokenizer_files import generation_eos, read_tokenizer

    require_model_folder(folder)
    checkpoint = open_checkpoint(folder)
    fingerprint(folder)
    for name in checkpoint.weights.names():
        checkpoint.weights.load(name)
    read_tokenizer(folder, checkpoint.facts.vocab)
    generation_eos(folder)


def test_the_attack_itself_finds_nothing() -> None:
    """Whole commands in processes of their own, whose time and memory is measured."""
    ended = subprocess.run(
        [sys.executable, ATTACK, "--number", "4", "--seed", "11"], capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 cases" in ended.stdout
