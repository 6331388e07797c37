"""`picompile targets`, `doctor` and `models`: what is known of machines and models."""

import json
import shutil
import time
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from helpers.refusals import assert_refused
from helpers.support import Cli
from picompile.cli import doctor_findings
from picompile.machine import host
from picompile.machine import measured as local
from picompile.machine.gpu import GpuName, GpuSpeed
from picompile.machine.host import Host
from picompile.machine.measured import cache_file, measure_local
from picompile.machine.targets import TARGETS, find_native_target
from picompile.placement.known_models import KNOWN
from picompile_runtime.devices.cuda.driver import CudaError

GPU = GpuName("GPU of nobody", "12.4", 89, 24 * 10**9)
SPEED = GpuSpeed(23 * 10**9, 9.1e11, 2.4e10, 2.6e10, 1.74e-5, 1.26e-6)


@pytest.fixture(autouse=True)
def not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "find_gpu", lambda: GPU)
    monkeypatch.setattr(local, "measure_gpu", lambda: SPEED)
    monkeypatch.setattr(local, "measure_host", lambda threads: Host(10**10, 2e10, 0.8))


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> GpuName:
        raise CudaError("no driver today")

    monkeypatch.setattr(local, "find_gpu", find)
    monkeypatch.setattr(local, "measure_host", lambda threads: Host(10**10, 2e10, 0.8))


def test_targets_are_a_table(cli: Cli, without_gpu: None) -> None:
    ended = cli("targets")
    assert ended.code == 0
    lines = {line.split()[0]: line for line in ended.out.splitlines() if line[:1] not in ("", " ")}
    assert {*TARGETS, "local"} <= set(lines)
    assert "plan, compile" in lines["cpu"]
    figures = ["24", "GiB", "1.01", "TB/s", "31.5", "GB/s", "sm_89", "plan,", "compile"]
    assert lines["4090"].split() == ["4090", "GeForce", "RTX", "4090", *figures]
    assert all(row.source in ended.out for row in TARGETS.values())
    assert "not measured yet" in lines["local"]


def test_targets_show_what_was_measured(cli: Cli, with_gpu: None) -> None:
    expected = json.loads(json.dumps([{**asdict(row), "compiles": row.compiles} for row in TARGETS.values()]))
    assert json.loads(cli("targets", "--json").out) == expected
    assert not cache_file().exists()
    measured = measure_local()
    *rows, local_row = json.loads(cli("targets", "--json").out)
    assert rows == expected
    assert local_row == json.loads(json.dumps({**asdict(measured.target), "compiles": False}))
    shown = cli("targets").out
    assert "not measured yet" not in shown and all(figure in shown for figure in ("22.4 GiB", "910 GB/s", "24 GB/s"))


def test_doctor_describes_this_machine(cli: Cli) -> None:
    ended = cli("doctor", "--json")
    facts = json.loads(ended.out)
    assert ended.code == (6 if facts["missing"] else 0)
    assert facts["torch"].startswith("2.13.")
    assert facts["memory bandwidth"].endswith("/s, reading")
    assert facts["local"]["host_bytes_per_s"] > 1e8
    assert facts["scattered rows"].endswith(" % of it, reading rows that lie apart")
    assert facts["local"]["host_scattered_share"] == facts["local"]["target"]["host_efficiency"] <= 1
    if native := find_native_target():
        assert facts["code"] == f"{native.isas[0]} is the best for it: --target native, or {native.name}"
        assert set(native.features) <= set(facts["instruction sets"].split(", "))
    assert facts["measured"] == "just now"
    assert facts["nvrtc"].startswith("12.8.")


def test_doctor_says_what_gpu_targets_need(cli: Cli, without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is nothing that is missing: other targets do without."""

    def installed(name: str) -> str:
        if "nvrtc" in name:
            raise PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(doctor_findings, "version", installed)
    facts = json.loads(cli("doctor", "--json").out)
    assert "pip install 'cuda-bindings>=12.8,<13'" in facts["nvrtc"]
    assert not any("nvrtc" in missing for missing in facts["missing"])
    assert facts["gpu"].endswith("; no driver today")
    assert (facts["local"]["no_gpu"], facts["local"]["gpu"]) == ("no driver today", None)
    assert not {"gpu bandwidth", "pcie bandwidth", "gpu exchange", "gpu launch"} & set(facts)


def test_doctor_shows_the_gpu(cli: Cli, with_gpu: None) -> None:
    facts = json.loads(cli("doctor", "--json").out)
    assert facts["gpu"].startswith("GPU of nobody, sm_89, 24 GB, 23 GB free when measured, CUDA 12.4;")
    assert facts["gpu"].endswith("; --target with code for it: 4060, 4070, 4080, 4090")
    figures = [facts[name].split(",")[0] for name in ("gpu bandwidth", "pcie bandwidth", "gpu exchange", "gpu launch")]
    assert figures == ["910 GB/s", "24 GB/s to the GPU", "17.4 µs", "1.3 µs"]
    assert facts["local"]["gpu"] == asdict(SPEED)
    assert facts["local"]["target"]["sync_s"] == SPEED.exchange_s


@pytest.mark.slow("measures this machine twice")
def test_doctor_shows_the_age_of_the_measurement(cli: Cli, with_gpu: None) -> None:
    measured = measure_local()
    for age_s, says in (
        (-100, "just now"),
        (59, "just now"),
        (61, "1 minute ago; --measure does it anew"),
        (3 * 3600 + 9, "3 hours ago; --measure does it anew"),
        (400 * 86400, "400 days ago; --measure does it anew"),
    ):
        local.store(replace(measured, measured_at_s=time.time() - age_s))
        assert json.loads(cli("doctor", "--json").out)["measured"] == says
    assert json.loads(cli("doctor", "--json", "--measure").out)["measured"] == "just now"
    assert json.loads(cli("doctor", "--json").out)["measured"] == "just now"
    # Without a cache too.
    shutil.rmtree(cache_file().parent.parent)
    cache_file().parent.parent.write_text("in the way")
    assert json.loads(cli("doctor", "--json").out)["measured"] == "just now"


def test_doctor_misses_gcc(cli: Cli, without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    ended = cli("doctor")
    assert ended.code == 6
    assert "gcc" in ended.err
    assert ended.err.count("\n") == 1
    assert any(line.startswith("✗ gcc") for line in ended.out.splitlines())


def test_models_are_listed(cli: Cli) -> None:
    shown, refused = (cli("models", *more).out for more in ((), ("--refused",)))
    assert "\nLlamaForCausalLM" in shown and "MixtralForCausalLM" in shown
    assert "\nLlamaForCausalLM" not in refused and "JetMoeAttention is a mixture itself" in refused
    assert_refused(cli("models", "gpt-9"), 2, "of a class or type with 'gpt-9' in it")
    every, refused, named = (
        json.loads(cli("models", *more, "--json").out) for more in ((), ("--refused",), ("mamba",))
    )
    assert {entry["result"] for entry in every} == {"ok", "part", "refused", "untried"}
    assert refused == [entry for entry in every if entry["result"] != "ok"]
    # Layers of attention alone are no checkpoint of LFM2.
    (lfm2,) = (entry for entry in every if entry["model_type"] == "lfm2")
    assert lfm2["result"] == "part" and lfm2["kinds"] == ["full_attention"] and "conv" in lfm2["refused_kinds"]
    assert "full attention alone; refused: short convolution" in cli("models", "lfm2").out
    assert {"mamba", "falcon_mamba"} <= {entry["model_type"] for entry in named}


def test_doctor_says_how_to_mend_what_is_missing(cli: Cli, without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    lines = cli("doctor").out.splitlines()
    assert "sudo apt install gcc" in lines[lines.index("Missing:") + 2]
    assert not any(line.startswith("  python") for line in lines)


def test_doctor_predicts_well_known_models(cli: Cli, without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "host_memory", lambda: (2 * 10**10, 2 * 10**10))
    found = {row["model"]: row for row in json.loads(cli("doctor", "--json").out)["models"]}
    assert list(found) == list(KNOWN)
    for row in found.values():
        fits = row["needed_bytes"] <= row["available_bytes"] == int(2 * 10**10 * 0.95)
        assert fits == (row["tokens_per_s"] is not None) == (row["verdict"] != "does not fit")
        if fits:
            assert row["verdict"] == (
                "fast" if row["tokens_per_s"] >= 10 else "usable" if row["tokens_per_s"] >= 3 else "slow"
            )
    assert {row["verdict"] for row in found.values()} == {"fast", "usable", "slow", "does not fit"}
    # A token reads an eighth of its experts.
    assert found["olmoe-1b-7b"]["tokens_per_s"] > 2 * found["llama-3.1-8b"]["tokens_per_s"]

    ended = cli("doctor")
    assert ended.code == 0 and "Nothing is missing" in ended.out and "predictions" in ended.out
    assert max(map(len, ended.out.splitlines())) < 80
    rows = [line.split() for line in ended.out.splitlines() if line.split()[:1] and line.split()[0] in found]
    assert [row[0] for row in rows] == list(KNOWN)
    assert all(" ".join(row).endswith(found[row[0]]["verdict"]) for row in rows)
    assert "instruction sets" not in ended.out and "instruction sets" in cli("doctor", "--verbose").out


def test_doctor_shows_a_gpu_in_plain_words(cli: Cli, with_gpu: None) -> None:
    assert "GPU        GPU of nobody, 24 GB, 23 GB free, 910 GB/s\n" in cli("doctor").out
    rows = {row["model"]: row for row in json.loads(cli("doctor", "--json").out)["models"]}
    # Mixtures are computed by CPUs alone.
    assert rows["llama-3.1-8b"]["tokens_per_s"] > 5 * rows["olmoe-1b-7b"]["tokens_per_s"]


def test_doctor_keeps_the_fastest_measurement_of_memory(
    cli: Cli, without_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for now, kept in ((2e10, 2e10), (1e10, 2e10), (3e10, 3e10)):
        monkeypatch.setattr(local, "measure_host", lambda threads, now=now: Host(10**10, now, 0.8))
        assert json.loads(cli("doctor", "--json").out)["local"]["host_bytes_per_s"] == kept
        assert measure_local().host.bytes_per_s == kept
