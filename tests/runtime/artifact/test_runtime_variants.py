"""Which of an artifact's code runs here: the best that this machine has, the one asked for, or none."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

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
CPUINFO = (
    "processor\t: 0\nmodel name\t: Some\nflags\t\t: fpu avx2 fma\nbugs\t\t:\n",
    "processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: fp avx2 fma asimddp\nCPU part\t: 0xd0c\n",
)


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`pretend("aarch64", "asimd")`: what this machine says that it is."""

    def be(name: str, *features: str) -> None:
        monkeypatch.setattr(platform, "machine", lambda: name)
        monkeypatch.setattr(machine, "cpu_features", lambda: frozenset(features))

    return be


def test_the_best_variant_for_this_machine_is_chosen_or_the_one_asked_for(
    pretend: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, features, asked, expected in (
        ("x86_64", AVX512, "", "x86-64-v4"),
        ("x86_64", AVX2, "", "x86-64-v3"),
        ("aarch64", ["asimd", "asimddp"], "", "aarch64-dotprod"),
        ("x86_64", AVX512, "x86-64-v3", "x86-64-v3"),
        ("x86_64", ["avx512f"], "", MachineError("the artifact needs a processor with avx2, fma; compile")),
        ("aarch64", AVX512, "", MachineError("the artifact needs a processor with asimddp; compile")),
        ("riscv64", AVX512, "", MachineError("is for Linux on aarch64 or x86_64, this is Linux on riscv64; compile")),
        ("x86_64", AVX512, "aarch64-dotprod", MachineError("for Linux on aarch64, this is Linux on x86_64")),
        ("x86_64", AVX2, "x86-64-v4", MachineError("needs a processor with avx512f")),
        ("x86_64", AVX2, "avx2", RequestError("'avx2', but the artifact has code for: x86-64-v4, x86-64-v3, aarch64-")),
    ):
        pretend(name, *features)
        monkeypatch.setenv("PICOMPILE_ISA", asked)
        if isinstance(expected, str):
            assert choose_variant(BEST_FIRST).isa == expected
        else:
            with pytest.raises(type(expected), match=str(expected)):
                choose_variant(BEST_FIRST)
    monkeypatch.delenv("PICOMPILE_ISA")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(MachineError, match="for Linux on aarch64 or x86_64, this is Darwin on x86_64"):
        choose_variant(BEST_FIRST)


def test_features_are_read_as_linux_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / Path(path).name)
    for text in CPUINFO:
        (tmp_path / "cpuinfo").write_text(text)
        assert {*AVX2} < machine.cpu_features() <= {*text.split()}
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


def test_only_the_code_that_runs_is_mapped(
    twofold: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with load(twofold) as engine:
        assert engine.artifact.variant.isa == "toy"
        assert str(twofold / "kernels/host.toy.so") in mapped()
        engine.prefill([1, 2])
    verify(twofold)
    assert str(twofold / "kernels/host.dream.so") not in mapped()
    (twofold / "tokenizer.json").write_text("{}")
    write_manifest(twofold, changes={"code": json.loads((twofold / "manifest.json").read_text())["code"]})
    for asked, code, says in (
        ("dream", 6, "the artifact needs a processor with avx4096; compile the model for this one"),
        ("nothing", 2, "PICOMPILE_ISA is 'nothing', but the artifact has code for: dream, toy"),
    ):
        monkeypatch.setenv("PICOMPILE_ISA", asked)
        assert main([str(twofold), "-p", "Hi"]) == code
        assert capsys.readouterr().err == f"error: {says}\n"


@pytest.mark.parametrize("isa", ["dream", "toy"])
def test_damaged_code_is_found_whether_it_runs_here_or_not(twofold: Path, isa: str) -> None:
    path = twofold / f"kernels/host.{isa}.so"
    data = path.read_bytes()
    for damaged, says in ((data[:-1] + b"x", "was changed"), (data[:-1], "bytes instead of")):
        path.write_bytes(damaged)
        for use in (load, verify):
            with pytest.raises(ArtifactError, match=rf"host\.{isa}\.so: .*{says}"):
                use(twofold)


def test_other_machines_can_verify(make_artifact: Callable[..., Path], twofold: Path) -> None:
    """Loading an artifact for another machine fails before weights are hashed, but it can be verified. All code that
    runs here is checked then.
    """
    other = make_artifact("other", manifest={"code": [code_entry(machine="riscv128")]})
    newer = make_artifact("newer", manifest={"code": [code_entry(features=["avx4096", "amx-dream"])]})
    (newer / "weights.safetensors").write_bytes(b"")
    with pytest.raises(MachineError, match="for Linux on riscv128, this is Linux on"):
        open_artifact(other)
    with pytest.raises(MachineError, match="needs a processor with amx-dream, avx4096; compile"):
        open_artifact(newer)
    verify(other)
    source = "int pi_run(void) { return -1; } int pi_last_error(void) { return 0; }"
    second = twofold / "kernels" / "host.second.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-o", second, "-"], input=source, text=True, check=True)
    entries = [code_entry("toy", "kernels/host.toy.so"), code_entry("second", "kernels/host.second.so")]
    write_manifest(twofold, changes={"code": entries})
    load(twofold).close()
    with pytest.raises(ArtifactError, match=r"host\.second\.so: has no kernel called"):
        verify(twofold)
