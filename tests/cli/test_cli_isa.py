"""Artifacts with code for several instruction sets: made, shown, run with each, and refused where none fits."""

import json
import shutil
from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from helpers.support import CPU_TARGET, BuildOnce, Cli, compile_for_test
from picompile.machine.targets import find_native_target
from picompile_codegen.build.host_library import c_compiler
from picompile_codegen.build.isa import BF16_BASE, ISAS
from picompile_codegen.errors import ToolchainError
from picompile_runtime.artifact.manifest import sealed

IDS = "1,15,7,200,31"


@pytest.fixture(scope="module")
def manifold(build_once: BuildOnce, tiny_model: Path) -> Path:
    """`tiny_model` for everything that code is made for by default, and for AArch64."""
    for name in (*CPU_TARGET.isas, "aarch64-dotprod"):
        try:
            c_compiler(ISAS[name])
        except ToolchainError as error:
            pytest.skip(str(error))
    # `cpu` as tests have it leaves out what is not used here.
    targets = "cpu-arm64,cpu-avx2,cpu-avx512-vnni"
    return build_once(
        "manifold", lambda folder: compile_for_test(tiny_model, folder, target=targets, quant="q4", context=32)
    )


def tokens(cli: Cli, artifact: Path) -> list[int]:
    ended = cli("run", artifact, "--ids", IDS, "-n", "8", "--json")
    assert ended.code == 0, ended.err
    return list(json.loads(ended.out)["tokens"])


def test_the_default_target_has_code_for_avx2_and_avx512(every_isa: None) -> None:
    """AVX2 for all of x86, and what is better where it is there."""
    from picompile.artifact.code import planned_code

    assert [code.isa.name for code in planned_code("cpu")] == ["x86-64-v4-vnni", "x86-64-v3"]


@pytest.mark.slow("compiles for four instruction sets; each has fast tests")
def test_files_and_manifest(cli: Cli, manifold: Path) -> None:
    manifest = json.loads((manifold / "manifest.json").read_text())
    names = ["aarch64-dotprod", "x86-64-v4-vnni", "x86-64-v3"]
    files = [f"kernels/host.{name}.so" for name in names]
    assert [(entry["isa"], entry["file"]) for entry in manifest["code"]] == list(zip(names, files, strict=True))
    assert {f"kernels/{path.name}" for path in (manifold / "kernels").iterdir()} == set(files)
    facts = json.loads(cli("inspect", manifold, "--json").out)["code"]
    native = find_native_target()
    best = BF16_BASE if native and ISAS[native.isas[0]].prompts_in_bf16 else native.isas[0] if native else ""
    used = best if best in names else "x86-64-v3"
    assert [entry["isa"] for entry in facts if entry["used_here"]] == [used]
    assert f"{used} (used here): " in cli("inspect", manifold).out
    assert cli("verify", manifold).code == 0


@pytest.mark.slow("compiles for four instruction sets; each has fast tests")
def test_code_for_another_machine_is_refused(cli: Cli, manifold: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = tokens(cli, manifold)
    monkeypatch.setenv("PICOMPILE_ISA", "x86-64-v3")
    assert tokens(cli, manifold) == best
    monkeypatch.setenv("PICOMPILE_ISA", "aarch64-dotprod")
    for command in (["run", manifold, "-p", "x"], ["bench", manifold], ["eval", manifold, "--text", __file__]):
        ended = cli(*command)
        assert (ended.code, ended.out) == (6, "")
        assert ended.err == (
            "error: the artifact is for Linux on aarch64, this is Linux on x86_64; compile the model for this one\n"
        )
    assert cli("inspect", manifold).code == 0
    assert cli("verify", manifold).code == 0
    monkeypatch.setenv("PICOMPILE_ISA", "avx2")
    ended = cli("run", manifold, "-p", "x")
    assert ended.code == 2 and "'avx2'" in ended.err and "x86-64-v4-vnni, x86-64-v3" in ended.err


@pytest.mark.slow("compiles for four instruction sets; each has fast tests")
def test_without_the_code_for_this_machine(cli: Cli, manifold: Path, tmp_path: Path) -> None:
    """The artifact is that of `compile --target cpu-arm64`, but for the names of files."""
    artifact = Path(shutil.copytree(manifold, tmp_path / "artifact"))
    manifest = json.loads((artifact / "manifest.json").read_text())
    manifest["code"] = manifest["code"][:1]
    (artifact / "manifest.json").write_bytes(sealed(manifest))
    ended = cli("run", artifact, "-p", "x")
    assert ended.code == 6 and ended.err.count("\n") == 1
    (artifact / "kernels" / "host.x86-64-v3.so").unlink()
    assert_refused(cli("verify", artifact), 4, "host.x86-64-v3.so")


def test_a_missing_cross_compiler_is_reported_first(
    cli: Cli, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(
        "picompile.compile.driver.load_model", lambda model, activation: pytest.fail("the model was captured")
    )
    ended = cli("compile", tiny_model, "-o", tmp_path / "artifact", "--target", "cpu,cpu-arm64")
    assert ended.code == 6
    assert ended.err.startswith("error: aarch64-linux-gnu-gcc links the code for aarch64, and was not found; install")
    assert not (tmp_path / "artifact").exists()
