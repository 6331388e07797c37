"""Which of an artifact's code runs here: the best that this machine has, the one asked for, or none."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from helpers.toys.toy_artifact import code_entry, write_manifest
from picompile_runtime import ArtifactError, MachineError, RequestError, load, open_artifact, verify
from picompile_runtime.__main__ import main
from picompile_runtime.artifact.interfaces import CodeVariant, choose_variant
from picompile_runtime.devices import machine

AVX2, AVX512 = ("avx2", "fma"), ("avx2", "fma", "avx512f")
BEST_FIRST = [
    CodeVariant("x86-64-v4", "x86_64", AVX512, "kernels/host.x86-64-v4.so"),
    CodeVariant("x86-64-v3", "x86_64", AVX2, "kernels/host.x86-64-v3.so"),
    CodeVariant("aarch64-dotprod", "aarch64", ("asimddp",), "kernels/host.aarch64-dotprod.so"),
]
CPUINFO = {
    "x86_64": "processor\t: 0\nmodel name\t: Some\nflags\t\t: fpu avx2 fma\nbugs\t\t:\n",
    "aarch64": "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp asimd asimdhp asimddp\nCPU part\t: 0xd0c\n",
}


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`pretend("aarch64", "asimd")`: what this machine says that it is."""

    def be(name: str, *features: str) -> None:
        monkeypatch.setattr(platform, "machine", lambda: name)
        monkeypatch.setattr(machine, "cpu_features", lambda: frozenset(features))

    return be


@pytest.mark.parametrize(
    ("name", "features", "isa"),
    [
        ("x86_64", AVX512, "x86-64-v4"),
        ("x86_64", [*AVX512, "amx_tile"], "x86-64-v4"),
        ("x86_64", AVX2, "x86-64-v3"),
        ("x86_64", ["fma", "avx512f", "avx2"], "x86-64-v4"),
        ("aarch64", ["asimd", "asimddp"], "aarch64-dotprod"),
    ],
)
def test_the_best_variant_for_this_machine_is_chosen(
    pretend: Callable[..., None], name: str, features: Sequence[str], isa: str
) -> None:
    pretend(name, *features)
    assert choose_variant(BEST_FIRST).isa == isa


@pytest.mark.parametrize(
    ("name", "features", "message"),
    [
        ("x86_64", ["avx2"], "the artifact needs a processor with fma; compile"),
        ("x86_64", [], "the artifact needs a processor with avx2, fma; compile"),
        ("x86_64", ["avx512f"], "the artifact needs a processor with avx2, fma; compile"),
        ("aarch64", AVX512, "the artifact needs a processor with asimddp; compile"),
        ("riscv64", AVX512, "the artifact is for Linux on aarch64 or x86_64, this is Linux on riscv64; compile"),
    ],
)
def test_code_for_other_machines_raises(
    pretend: Callable[..., None], name: str, features: Sequence[str], message: str
) -> None:
    pretend(name, *features)
    with pytest.raises(MachineError, match=f"^{message}") as caught:
        choose_variant(BEST_FIRST)
    assert caught.value.exit_code == 6


def test_code_for_another_system_raises(pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("x86_64", *AVX512)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(MachineError, match="for Linux on aarch64 or x86_64, this is Darwin on x86_64"):
        choose_variant(BEST_FIRST)


def test_a_variant_can_be_requested(pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend("x86_64", *AVX512)
    monkeypatch.setenv("PICOMPILE_ISA", "x86-64-v3")
    assert choose_variant(BEST_FIRST).isa == "x86-64-v3"
    monkeypatch.setenv("PICOMPILE_ISA", "aarch64-dotprod")
    with pytest.raises(MachineError, match="for Linux on aarch64, this is Linux on x86_64"):
        choose_variant(BEST_FIRST)
    pretend("x86_64", *AVX2)
    monkeypatch.setenv("PICOMPILE_ISA", "x86-64-v4")
    with pytest.raises(MachineError, match="needs a processor with avx512f"):
        choose_variant(BEST_FIRST)
    monkeypatch.setenv("PICOMPILE_ISA", "avx2")
    with pytest.raises(RequestError, match="'avx2', but the artifact has code for: x86-64-v4, x86-64-v3, aarch64-dot"):
        choose_variant(BEST_FIRST)
    monkeypatch.setenv("PICOMPILE_ISA", "")
    assert choose_variant(BEST_FIRST).isa == "x86-64-v3"


@pytest.mark.parametrize(("name", "features"), [("x86_64", {"fpu", *AVX2}), ("aarch64", {"fp", "asimd", "asimddp"})])
def test_features_are_read_as_linux_writes_them(
    name: str, features: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO[name])
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / Path(path).name)
    assert features <= machine.cpu_features() <= {*CPUINFO[name].split()}
    (tmp_path / "cpuinfo").unlink()
    assert machine.cpu_features() == frozenset()


# ---- artifacts ----


@pytest.fixture
def twofold(make_artifact: Callable[..., Path]) -> Path:
    """Code that no machine has, and behind it the toy's own."""
    folder = make_artifact()
    library = folder / "kernels" / "host.so"
    for isa in ("dream", "toy"):
        (folder / f"kernels/host.{isa}.so").write_bytes(library.read_bytes())
    library.unlink()
    entries = [
        code_entry("dream", "kernels/host.dream.so", features=["avx4096"]),
        code_entry("toy", "kernels/host.toy.so"),
    ]
    write_manifest(folder, changes={"code": entries})
    return folder


def mapped() -> str:
    return Path("/proc/self/maps").read_text()


def test_only_the_code_that_runs_is_mapped(twofold: Path) -> None:
    with load(twofold) as engine:
        assert engine.artifact.variant.isa == "toy"
        assert str(twofold / "kernels/host.toy.so") in mapped()
        engine.prefill([1, 2])
    verify(twofold)
    assert str(twofold / "kernels/host.dream.so") not in mapped()


def test_verify_checks_all_code_that_runs_here(twofold: Path) -> None:
    source = "int pi_run(void) { return -1; } int pi_last_error(void) { return 0; }"
    other = twofold / "kernels" / "host.second.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-o", other, "-"], input=source, text=True, check=True)
    entries = [code_entry("toy", "kernels/host.toy.so"), code_entry("second", "kernels/host.second.so")]
    write_manifest(twofold, changes={"code": entries})
    load(twofold).close()
    with pytest.raises(ArtifactError, match=r"host\.second\.so: has no kernel called"):
        verify(twofold)


@pytest.mark.parametrize("isa", ["dream", "toy"])
@pytest.mark.parametrize("use", [load, verify])
def test_damaged_code_is_found_whether_it_runs_here_or_not(twofold: Path, isa: str, use: Callable[[Path], Any]) -> None:
    path = twofold / f"kernels/host.{isa}.so"
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(ArtifactError, match=rf"host\.{isa}\.so: was changed"):
        use(twofold)
    path.write_bytes(data[:-1])
    with pytest.raises(ArtifactError, match=rf"host\.{isa}\.so: has {len(data) - 1} bytes instead of {len(data)}"):
        use(twofold)
    path.unlink()
    with pytest.raises(ArtifactError, match=rf"host\.{isa}\.so: cannot be opened"):
        use(twofold)


def test_other_machines_can_verify(make_artifact: Callable[..., Path]) -> None:
    """Loading an artifact for another machine fails before weights are hashed, but it can be verified."""
    other = make_artifact("other", manifest={"code": [code_entry(machine="riscv128")]})
    newer = make_artifact("newer", manifest={"code": [code_entry(features=["avx4096", "amx-dream"])]})
    (newer / "weights.safetensors").write_bytes(b"")
    with pytest.raises(MachineError, match="for Linux on riscv128, this is Linux on"):
        open_artifact(other)
    with pytest.raises(MachineError, match="needs a processor with amx-dream, avx4096; compile"):
        open_artifact(newer)
    verify(other)


def test_exit_codes(
    twofold: Path,
    make_artifact: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts = {"tokenizer.json": "{}"}
    newer = make_artifact("newer", texts=texts, manifest={"code": [code_entry(features=["avx4096"])]})
    assert main([str(newer), "-p", "Hi"]) == 6
    monkeypatch.setenv("PICOMPILE_ISA", "dream")
    assert main([str(twofold), "-p", "Hi"]) == 6
    monkeypatch.setenv("PICOMPILE_ISA", "nothing")
    assert main([str(twofold), "-p", "Hi"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "error: the artifact needs a processor with avx4096; compile the model for this one"
    assert lines[1] == lines[0]
    assert lines[2] == "error: PICOMPILE_ISA is 'nothing', but the artifact has code for: dream, toy"
    assert len(lines) == 3
