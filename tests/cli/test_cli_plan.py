"""`picompile plan`, and `compile --plan`."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import picompile_runtime
from helpers.hybrid import greedy
from helpers.refusals import assert_refused
from helpers.support import BUNDLED_MODEL, BuildOnce, Cli, compile_for_test
from picompile.cli.plan_show import gpu_verdict, three_digits, verdict
from picompile.machine import measured as local
from picompile.machine.host import Host
from picompile.machine.targets import HOST_DENSE_EFFICIENCY, HOST_EFFICIENCY, pcie_bytes_per_s
from picompile.placement.plan import MemoryRow, Plan
from picompile.placement.plan_file import read_plan
from picompile.synth.shapes import SHAPES, shape_names
from picompile_runtime.devices.cuda.driver import CudaError

CURVE = ("--shape", "tiny-reglu", "--firing", "10%", "--target", "4090")
# A host so slow that the GPU is worth it for a tiny model, and a GPU so small that not all of it fits.
SLOW_HOST = ("--host-bandwidth", "0.02", "--target", "4090")


@pytest.fixture(autouse=True)
def without_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This machine has no GPU and a memory of 20 GB/s."""

    def find() -> None:
        raise CudaError("no driver today")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(local, "find_gpu", find)
    monkeypatch.setattr(local, "measure_host", lambda threads: Host(10**10, 2e10, 0.8))


def test_a_plan_of_a_named_shape(cli: Cli) -> None:
    ended = cli("plan", "--shape", "opt-175b", "--firing", "opt", "--target", "4090", "--host-memory", "128GiB")
    assert (ended.code, ended.err) == (0, "")
    for words in (
        *(
            "opt-175b, 175 B parameters, ReLU, 4bit, context 2048",
            "the curve opt; predictor learned",
            "4090: GeForce RTX 4090",
            "128 GiB at 51.2 GB/s",
        ),
        *(
            "tokens/s predicted, 1024 tokens in the cache",
            "Is leaving out neurons worth it? Yes: ",
            "predicted, not measured",
        ),
    ):
        assert words in ended.out
    lines = ended.out.splitlines()
    assert all(len(line) <= 80 and line == line.rstrip() for line in lines)
    page, section = lines[-1].removeprefix("What is measured and what assumed: ").split(", ")
    assert f"\n### {section}\n" in (Path(__file__).parents[2] / page).read_text()
    rows = {line.split()[0]: line for line in lines if line}
    assert rows["available"].split()[1:] == ["23", "GiB", "128", "GiB"]
    layers = [line.split()[0] for line in lines[lines.index(rows["layers"]) + 1 : lines.index(rows["head"])]]
    ends = [(int(first), int(last or first)) for first, _, last in (text.partition("-") for text in layers)]
    assert [number for first, last in ends for number in range(first, last + 1)] == list(range(96))


def test_names_in_any_case(cli: Cli) -> None:
    words = ("--firing", "10%", "--vram-budget", "8GiB")
    plan = _plan(cli, "--shape", "Tiny ReGLU", "--target", "GeForce RTX 4090", *words)
    assert plan == _plan(cli, *CURVE, *words[2:]) and plan["target"] == "4090"
    assert_refused(cli("plan", "--shape", "tiny-reglu", "--target", "4090 Ti", *words), 2, "did you mean 4090")


def test_the_time_of_a_prompt(cli: Cli) -> None:
    words = ("--shape", "llama-13b", "--firing", "10%", "--target", "4060", "--host-bandwidth", "60", "--prompt")
    ended = cli("plan", *words, "1500")
    assert (ended.code, ended.err) == (0, "")
    found = re.search(r"([\d.]+) s predicted to the first token of a prompt of 1500\n +\(3 chunks of ", ended.out)
    both = re.search(r"([\d.]+) s with an answer of 256: ([\d.]+) times as fast as dense inference", ended.out)
    assert found and both
    assert float(found[1]) < float(both[1])
    assert f"worth it? Yes: {both[2]} times as fast as dense inference." in ended.out
    estimate = json.loads(cli("plan", *words, "1500", "--chunk", "128", "--json").out)["prompt"]
    assert (estimate["tokens"], estimate["chunks"]) == (1500, 12)
    assert estimate["copy_s"] == pytest.approx(12 * estimate["copied_bytes"] / (0.8 * pcie_bytes_per_s(4, 8)))
    assert_refused(cli("plan", *words, "9000"), 2, "--prompt: 9000 tokens are more than the context, 4096")
    ended = cli("plan", "--shape", "tiny-reglu", "--firing", "10%", "--target", "cpu", "--prompt", "64", "--json")
    assert (ended.code, json.loads(ended.out)["prompt"]) == (0, None)
    assert "cannot be predicted: prompts would be read on the host" in ended.err


def test_json_is_the_plan(cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "new" / "plan.json"
    words = ("--json", "-o", output, "--context", "37", "--at", "7", "--sequences", "3")
    ended = cli("plan", *CURVE, *words, "--quant", "f16")
    assert (ended.code, ended.err) == (0, "")
    plan = json.loads(ended.out)
    assert plan == json.loads(output.read_text())
    assert (plan["context"], plan["tokens"], plan["sequences"], plan["quant"]) == (37, 7, 3, "f16")
    assert (plan["fingerprint"], plan["firing"]) == (None, "the curve 10%")
    assert plan["accelerator_budget_bytes"] == int(24 * 2**30 * 0.96)
    assert plan["host_budget_bytes"] == 64 * 2**30
    assert plan["machine"]["gpu_bytes"] == int(plan["accelerator_budget_bytes"] * 0.95)
    assert_refused(cli("plan", *CURVE, *words, "--quant", "q8"), 2, "give --overwrite")
    assert json.loads(output.read_text()) == plan
    assert cli("plan", *CURVE, *words, "--quant", "q8", "--overwrite").code == 0
    assert read_plan(output).quant == "q8"


def test_options_reach_the_plan(cli: Cli, tiny_model: Path) -> None:
    words = ("--host-memory", "3GB", "--host-bandwidth", "7", "--margin", "0", "--objective", "impact")
    plan = _plan(cli, tiny_model, "--firing", "10%:30%", "--target", "3090", "--vram-budget", "50%", *words)
    assert plan["host_budget_bytes"] == plan["machine"]["host_bytes"] == 3 * 10**9
    assert plan["machine"]["host_bytes_per_s"] == 7e9
    assert plan["accelerator_budget_bytes"] == plan["machine"]["gpu_bytes"] == int(24 * 2**30 * 0.96) // 2
    assert (plan["objective"], plan["margin"], plan["model"]) == ("impact", 0.0, "tiny-model")
    assert plan["fingerprint"] is not None
    assert all(layer["hot"] is None for layer in plan["layers"])


def test_predictors_of_a_shape_may_read_the_layer_before(cli: Cli, tiny_model: Path) -> None:
    words = ("--shape", "llama-70b", "--firing", "5%", "--target", "4090")
    block, previous = (_plan(cli, *words, "--predictor-input", value) for value in ("block", "previous"))
    assert block["tokens_per_s"] * 1.1 < previous["tokens_per_s"]
    hidden = [layer["predict_hidden_s"] for layer in previous["layers"]]
    assert hidden[0] == 0 < min(hidden[1:])
    assert not any(layer["predict_hidden_s"] for layer in block["layers"])
    for words, says in (
        ((tiny_model, "--firing", "10%"), "applies to --shape"),
        (("--shape", "tiny-opt", "--firing", "opt", "--predictor", "exact"), "predictor exact has none"),
    ):
        assert_refused(cli("plan", *words, "--target", "4090", "--predictor-input", "previous"), 2, says)


def test_this_machine_is_measured(cli: Cli) -> None:
    ended = cli("plan", "--shape", "tiny-opt", "--firing", "opt", "--target", "cpu")
    assert ended.code == 0
    assert re.search(r"host    .* at 20 GB/s \(size as available, bandwidth as measured\)", ended.out)
    assert "GPU        host" not in ended.out
    here = _plan(cli, "--shape", "tiny-opt", "--firing", "opt")
    assert here["target"] == "local"
    assert here["machine"]["host_bytes_per_s"] == 2e10
    assert {row["device"] for row in here["memory"]} == {"host"}
    assert set(here["baselines"]) == {"host"}


def test_hosts_that_are_other_machines_reach_typical_shares(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buyer compares a GPU in a host with that host alone, so both plans assume the same of the host."""
    monkeypatch.setattr(local, "measure_host", lambda threads: Host(10**10, 2e10, 0.9))
    words = ("--shape", "tiny-opt", "--firing", "opt", "--target")
    other = ("--host-bandwidth", "9GB/s")
    for target, given, shares in (
        ("local", other, (0.9, 0.9)),
        ("cpu", (), (0.9, 0.9)),
        ("cpu", other, (HOST_EFFICIENCY, HOST_DENSE_EFFICIENCY)),
        ("4090", other, (HOST_EFFICIENCY, HOST_DENSE_EFFICIENCY)),
        ("4090", (), (HOST_EFFICIENCY, HOST_DENSE_EFFICIENCY)),
    ):
        machine = _plan(cli, *words, target, *given)["machine"]
        assert (machine["host_efficiency"], machine["host_dense_efficiency"]) == shares
    gpu, host = (_plan(cli, *words, target, *other) for target in ("4090", "cpu"))
    assert gpu["baselines"]["host"] == pytest.approx(host["baselines"]["host"])
    assert gpu["host_budget_bytes"] == host["host_budget_bytes"] == 64 * 2**30
    ended = cli("plan", *words, "cpu", *other)
    assert "64 GiB at 9 GB/s (size assumed)\n" in ended.out
    assert "70% of that for scattered rows, 80% for whole matrices (typical shares)\n" in ended.out
    ended = cli("plan", *words, "cpu", "--predictor", "none")
    assert "        90% of that for whole matrices (as measured)\n" in ended.out


def test_silu_models_have_no_predictor_unless_asked(cli: Cli, tmp_path: Path) -> None:
    config = tmp_path / "silu.json"
    config.write_text(json.dumps({**SHAPES["tiny-reglu"].config, "hidden_act": "silu"}))
    words = ("--shape", config, "--target", "cpu", "--host-memory", "8GiB")
    plain = _plan(cli, *words)
    assert plain["predictor"] == "none"
    ended = cli("plan", *words, "--firing", "30%", "--json")
    assert ended.err == (
        "silu: every neuron is computed since silu leaves none silent, so --firing changes nothing; --activation relu "
        "plans the model as it would be with ReLU\n"
    )
    assert json.loads(ended.out) == plain and plain["firing"] == "every neuron"
    assert all(layer["computed"] == layer["neurons"] for layer in plain["layers"])
    ended = cli("plan", *words, "--firing", "30%", "--predictor", "learned", "--json")
    assert json.loads(ended.out)["predictor"] == "learned"
    assert "the plan assumes that only those of --firing 30% are computed" in ended.err
    relu = _plan(cli, *words, "--firing", "30%", "--activation", "relu")
    assert relu["predictor"] == "learned"
    assert relu == _plan(cli, "--shape", "tiny-reglu", *words[2:], "--firing", "30%") | {"model": "silu"}
    shown = cli("plan", *words).out
    assert "parameters, SiLU, " in shown
    # Dense on the CPU alone is what the plan does: there is nothing to compare it with.
    assert "It fits, and is fast" in shown and "worth it" not in shown and "alone" not in shown
    split = cli("plan", *words[:2], *SLOW_HOST).out
    assert "\nIs splitting layers worth it? " in split and max(map(len, split.splitlines())) <= 80


def test_every_neuron_is_computed_without_predictors(cli: Cli, tiny_model: Path, tiny_profile: Path) -> None:
    words = ("--predictor", "none", "--vram-budget", "1MiB", *SLOW_HOST)
    profiled = _plan(cli, tiny_model, "--profile", tiny_profile, *words)
    ended = cli("plan", tiny_model, "--firing", "10%", *words, "--json")
    assert "every neuron is computed with --predictor none, so --firing changes nothing\n" in ended.err
    for plan in (profiled, json.loads(ended.out)):
        assert all(layer["computed"] == layer["neurons"] for layer in plan["layers"])
    assert profiled["tokens_per_s"] == pytest.approx(json.loads(ended.out)["tokens_per_s"])
    assert all(len(layer["hot"]) == layer["hot_neurons"] for layer in profiled["layers"])


def test_a_plan_that_does_not_fit_names_budgets(cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "new" / "plan.json"
    words = (*CURVE, "-o", output, "--vram-budget", "10kB")
    ended = cli("plan", *words, "--host-memory", "10kB")
    assert (ended.code, ended.out, ended.err.count("\n")) == (5, "", 1)
    assert not output.parent.exists()
    (enough,) = re.findall(r"--host-memory (\S+?)[,;]?(?:\s|$)", ended.err)
    assert cli("plan", *words, "--host-memory", enough).code == 0
    # More than there is gets a warning.
    ended = cli("plan", *CURVE, "--vram-budget", "24GiB")
    assert (ended.code, ended.err.count("\n")) == (0, 1)
    assert ended.err.startswith("--vram-budget 24GiB is more than 23.0 GiB")


def test_plans_from_a_profile_and_from_its_model(
    cli: Cli, tiny_model: Path, tiny_profile: Path, tmp_path: Path
) -> None:
    words = ("--vram-budget", "1MiB", "--predictor", "exact", "--context", "48", *SLOW_HOST)
    of_profile = _plan(cli, tiny_profile, *words)
    assert of_profile == _plan(cli, tiny_model, "--profile", tiny_profile, *words)
    assert of_profile["fingerprint"] is not None
    for layer in of_profile["layers"]:
        assert len(layer["hot"]) == layer["hot_neurons"]
    shutil.copytree(tiny_profile, tmp_path / "work" / "profile")
    plan = _plan(cli, tiny_model, "--work", tmp_path / "work", "--target", "cpu")
    assert plan["firing"] == f"the profile {tmp_path / 'work' / 'profile'}"


def test_takes_trained_predictors(cli: Cli, tiny_model: Path, tiny_profile: Path, tmp_path: Path) -> None:
    rank = random.randint(3, 70)
    parts = {"fc1": (rank, 96), "fc2": (200, rank), "bias": (200,)}
    file = tmp_path / "predictors.safetensors"
    tensors = {
        f"layers.{layer}.{part}": np.zeros(shape, np.float32) for layer in (0, 1) for part, shape in parts.items()
    }
    save_file(tensors, file)
    words = ("--predictors", file, "--target", "cpu", "--quant", "f16", "--host-memory", "1GiB")
    plan = _plan(cli, tiny_profile, *words)
    assert plan == _plan(cli, tiny_model, "--profile", tiny_profile, *words)
    taken = next(row["bytes"] for row in plan["memory"] if row["what"] == "predictors")
    # Rows in f16 are padded to 64 bytes; the bias is float32.
    assert taken == 2 * (rank * 96 * 2 + 200 * -(-rank * 2 // 64) * 64 + 832)
    # All layers of the config that a profile carries would be captured before they are compared.
    folder = Path(shutil.copytree(tiny_profile, tmp_path / "profile"))
    description = json.loads((folder / "profile.json").read_text())
    description["model"]["config"]["num_hidden_layers"] = 5000
    (folder / "profile.json").write_text(json.dumps(description))
    assert_refused(cli("plan", folder, "--predictors", file, "--target", "cpu"), 2, "has 2 layers, the model 5000")


DENSE = "times as fast as dense inference."
FITS = "\nDense, all of it fits on the GPU."
ENOUGH = "it is worth it from 1.1 times on."
SAME = f"No: the plan is as fast as dense inference; {ENOUGH}"
ONLY = f"No: the plan is only 1.05 times as fast as dense inference; {ENOUGH}"
NEAR = f"Yes: 1.25 times as fast as dense inference; {ENOUGH}"
LEFT_OUT = "; plan and compile with --predictor none."
FASTER = f"No: dense inference is faster, 1.05 times as fast as the plan{LEFT_OUT}"


def test_the_verdict_on_a_plan(curve_plan: Plan) -> None:
    host = [("host", "cold neurons", 900), ("host", "embedding", 5000), ("host", "tables", 50)]
    gpu = [("accelerator", "attention", 50), ("accelerator", "tables", 50), ("accelerator", "predictors", 70)]
    for rows, dense, gpu_bytes, says in (
        ([*host, *gpu], {}, 949, "Yes: dense, the model does not fit this machine."),
        ([*host, *gpu], {"host": 2.0}, 949, f"Yes: 5.00 {DENSE}"),
        ([*host, *gpu], {"host": 2.0, "layers-first": 8.0}, 949, NEAR),
        ([*host, *gpu], {"host": 2.0}, 1000, f"Yes: 5.00 {DENSE}{FITS}"),
        ([*host, *gpu], {"host": 9.5}, 949, ONLY),
        ([*host, *gpu], {"host": 9.98}, 1000, SAME + FITS),
        ([*host, *gpu], {"host": 10.0}, 949, SAME),
        ([*host, *gpu], {"host": 10.5}, 949, FASTER),
        # 1.096 is printed as 1.10, so it counts as that.
        ([*host, *gpu], {"host": 10 / 1.096}, 949, NEAR.replace("1.25", "1.10")),
        (host, {"host": 2.0}, 949, f"Yes: 5.00 {DENSE}"),
    ):
        machine = replace(curve_plan.machine, gpu_bytes=gpu_bytes)
        memory = tuple(MemoryRow(*row) for row in rows)
        plan = replace(curve_plan, token_s=0.1, baselines=dense, memory=memory, machine=machine)
        assert verdict(plan) == says


def test_whether_a_gpu_is_worth_it(curve_plan: Plan) -> None:
    """A buyer compares the machine with the GPU and without it, however the model runs best there."""
    on_gpu, on_host = (MemoryRow("accelerator", "attention", 50),), (MemoryRow("host", "attention", 50),)
    for memory, sparse, dense, says in (
        (on_gpu, 2.0, {"host": 1.0}, "Yes: 10.0 tokens/s with it, 2.00 without: 5.00 times."),
        (on_gpu, 2.0, {"host": 4.0}, "Yes: 10.0 tokens/s with it, 4.00 without: 2.50 times."),
        (on_gpu, 8.0, {}, f"Yes: 10.0 tokens/s with it, 8.00 without: 1.25 times.\nI{ENOUGH[1:]}"),
        (on_gpu, 9.5, {}, f"No: 10.0 tokens/s with it, 9.50 without: 1.05 times.\nI{ENOUGH[1:]}"),
        (on_gpu, None, {"layers-first": 3.0}, "Yes: the host alone does not hold the model."),
        (on_host, 10.0, {"host": 1.0}, "No: nothing is put on it, which would cost more than it saves."),
    ):
        plan = replace(curve_plan, token_s=0.1, baselines=dense, memory=memory, host_tokens_per_s=sparse)
        assert gpu_verdict(plan) == says
        assert (plan.gains["without_gpu"] is None) == (plan.without_gpu_tokens_per_s is None)


def test_both_gains_are_printed_and_in_json(cli: Cli) -> None:
    words = ("--shape", "llama-13b", "--firing", "reglu-13b", "--vram-budget", "8GiB", "--host-bandwidth", "51.2")
    ended, plan = cli("plan", *words, "--target", "4090"), _plan(cli, *words, "--target", "4090")
    host = _plan(cli, *words[:4], *words[6:], "--target", "cpu")
    assert plan["without_gpu_tokens_per_s"] == pytest.approx(host["tokens_per_s"])
    assert (host["without_gpu_tokens_per_s"], host["gains"]["without_gpu"]) == (None, None)
    assert plan["gains"] == {
        "dense": pytest.approx(plan["tokens_per_s"] / max(plan["baselines"].values())),
        "without_gpu": pytest.approx(plan["tokens_per_s"] / host["tokens_per_s"]),
    }
    with_it, without = (three_digits(each["tokens_per_s"]) for each in (plan, host))
    gain = f"{three_digits(plan['tokens_per_s'] / host['tokens_per_s'])} times"
    assert f"Is the GPU worth it? Yes: {with_it} tokens/s with it, {without} without: {gain}.\n" in ended.out
    assert f"\n{without:>6} tokens/s on the CPU alone: the plan is {gain} as fast\n" in ended.out
    assert "\n       (no other placement is more than 0.01% faster, by this model of costs)\n" in ended.out


def test_the_names_of_shapes_are_in_the_docs() -> None:
    section = (Path(__file__).parents[2] / "docs" / "cli.md").read_text().split("\n## plan\n")[1].split("\n## ")[0]
    assert [name for name in shape_names() if f"`{name}`" not in section] == []


def test_formats_have_the_names_that_users_gave(cli: Cli) -> None:
    for words, name in (
        ((), "4bit"),
        (("--quant", "4bit"), "4bit"),
        (("--quant", "q4m"), "q4m"),
        (("--quant", "q8"), "q8"),
        (("--quant", "5.2bpw"), "5.2bpw (planned as q6)"),
    ):
        assert f" parameters, ReLU, {name}, context " in cli("plan", *CURVE, *words).out


def test_figures_have_three_digits() -> None:
    figures = {
        0.123456: "0.123",
        2.0: "2.00",
        11.162: "11.2",
        97.804: "97.8",
        99.96: "100",
        102.4: "102",
        1234.5: "1,230",
    }
    for value, text in figures.items():
        assert three_digits(value) == text


@pytest.fixture
def curve_plan(cli: Cli, tmp_path: Path) -> Plan:
    output = tmp_path / "curve.json"
    assert cli("plan", *CURVE, "-o", output).code == 0
    return read_plan(output)


def _plan(cli: Cli, *words: object) -> dict[str, Any]:
    ended = cli("plan", *words, "--json")
    assert (ended.code, ended.err) == (0, "")
    plan = json.loads(ended.out)
    assert isinstance(plan, dict)
    return plan


def test_bad_input(cli: Cli, tiny_model: Path, tiny_profile: Path, tmp_path: Path) -> None:
    work, taken, old = tmp_path / "work", tmp_path / "taken.txt", tmp_path / "old"
    taken.write_text("mine")
    Path(shutil.copytree(tiny_profile, old))
    content = json.loads((old / "profile.json").read_text())
    del content["model"]["config"]
    (old / "profile.json").write_text(json.dumps(content))
    other = tmp_path / "other.json"
    other.write_text("[]")
    before = sorted(tmp_path.rglob("*"))
    for words, message in (
        ((), "give one of MODEL"),
        (("--shape", "tiny-reglu"), "tiny-reglu: its neurons fire sparsely (ReLU), and --firing says how often; give"),
        ((*CURVE, "--profile", tiny_profile), "--profile applies to a model"),
        (("--shape", "nosuch", "--firing", "opt"), "unknown shape 'nosuch'; docs/cli.md, plan, lists the names"),
        (("--shape", "llama3-70b"), "did you mean llama-70b or llama-3.3-70b or llama-7b? docs/cli.md, plan, lists"),
        (("Llama 3.3 70B",), "it is the name of a shape, so write --shape llama-3.3-70b"),
        ((*CURVE, "--quant", "Q4_K_M"), "known are 4bit, f16, q8, q6, q4m, q4, mxfp4, stored, auto, and budgets"),
        (("--shape", other, "--firing", "opt"), "not a JSON object"),
        (("--shape", "tiny-reglu", "--firing", "luck"), "'luck' is no firing curve"),
        ((*CURVE, "--target", "9999"), "unknown target '9999'"),
        ((*CURVE, "--target", "cpu", "--vram-budget", "1GiB"), "the target cpu has no GPU"),
        ((*CURVE, "--target", "local", "--vram-budget", "1GiB"), "no GPU that can be used (no driver today)"),
        ((*CURVE, "--vram-budget", "much"), "--vram-budget: 'much' is no size"),
        ((*CURVE, "--host-memory", "50%"), "--host-memory"),
        ((*CURVE, "--host-bandwidth", "0"), "--host-bandwidth"),
        ((*CURVE, "--margin", "100%"), "--margin must be at least 0 and below 1"),
        ((*CURVE, "--sequences", "0"), "--sequences"),
        ((*CURVE, "--context", "4097"), "more than the model's 4096 positions"),
        ((*CURVE, "-o", tmp_path), "is a folder"),
        ((*CURVE, "-o", taken), "exists and is no plan"),
        ((tmp_path / "no",), "no such file or folder"),
        ((tmp_path,), "no config.json in it"),
        ((tiny_model, "--profile", tiny_profile, "--firing", "opt"), "give one of them"),
        ((tiny_model, "--work", work, "--firing", "opt"), "leave one of them out"),
        ((tiny_model, "--profile", tiny_profile, "--context", "257"), "more than the model's 256 positions"),
        ((tiny_model, "--predictors", tmp_path, "--predictor", "exact"), "predictor exact needs none"),
        ((tiny_model, "--firing", "opt", "--predictors", tmp_path), "neither predictors.json nor"),
        ((BUNDLED_MODEL, "--profile", tiny_profile), "is a profile of another model"),
        ((tiny_profile, "--firing", "opt"), "is a profile already"),
        ((old,), f"plan MODEL --profile {old}"),
    ):
        assert_refused(cli("plan", *words), 2, message)
    assert [path for path in sorted(tmp_path.rglob("*")) if "cache" not in str(path)] == before


# ------------------------------------------------------------------------------------------------------ compile --plan


@pytest.mark.slow("compiles a model with a plan")
def test_compiles_as_planned(cli: Cli, build_once: BuildOnce, bundled_profile: Path, tmp_path: Path) -> None:
    path, artifact = tmp_path / "plan.json", tmp_path / "artifact"
    words = ("--quant", "f16", "--predictor", "exact", "--vram-budget", "8MiB", "--chunk", "128", *SLOW_HOST)
    _plan(cli, bundled_profile, *words, "-o", path)
    plan = read_plan(path)
    hot = [layer.hot_neurons for layer in plan.layers]
    assert any(0 < count < 704 for count in hot)
    ended = cli("compile", BUNDLED_MODEL, "-o", artifact, "--quant", "f16", "--plan", path)
    assert (ended.code, ended.err) == (0, "")
    unsplit = build_once("bundled-f16", lambda folder: compile_for_test(BUNDLED_MODEL, folder, quant="f16"))
    assert _tokens(artifact) == _tokens(unsplit)
    _check_inspect(cli, artifact, hot)
    kept = json.loads((artifact / "report.json").read_text())["plan"]
    assert all("hot" not in layer for layer in kept["layers"])
    expected = json.loads(path.read_text())
    for layer in expected["layers"]:
        del layer["hot"]
    assert kept == expected


def _tokens(artifact: Path) -> list[int]:
    with picompile_runtime.load(artifact, threads=1) as engine:
        return greedy(engine, [7, 300, 21], 60)[0]


def _check_inspect(cli: Cli, artifact: Path, hot: list[int]) -> None:
    facts = json.loads(cli("inspect", artifact, "--json").out)
    found = {(part["layer"], part["part"]): part["neurons"] for part in facts["ffn"]}
    for layer, count in enumerate(hot):
        assert (found.get((layer, "hot"), 0), found.get((layer, "cold"), 0)) == (count, 704 - count)
    for name, neurons in (("hot", sum(hot)), ("cold", 6 * 704 - sum(hot))):
        assert facts["parts"][name]["neurons"] == neurons
        # Gate, up and down in f16, of 192 elements each.
        assert facts["parts"][name]["weight_bytes"] == neurons * 3 * 192 * 2
    text = " ".join(cli("inspect", artifact).out.split())
    assert f"hot: {facts['parts']['hot']['blocks']} blocks, {sum(hot):,} neurons" in text
    assert "plan for 4090, 8 MiB of its GPU memory:" in text and "tokens/s predicted, not measured" in text


@pytest.fixture
def tiny_plan(cli: Cli, tiny_profile: Path, tmp_path: Path) -> Path:
    """A plan of `tiny_model` for predictor exact and a context of 256."""
    path = tmp_path / "plan.json"
    _plan(cli, tiny_profile, "--predictor", "exact", "-o", path, "--vram-budget", "1MiB", *SLOW_HOST)
    return path


@pytest.mark.slow("compiles a model with a plan")
def test_compile_warns_where_the_plan_does_not_hold(
    cli: Cli, tiny_model: Path, tiny_plan: Path, tmp_path: Path
) -> None:
    words = ("--plan", tiny_plan, "--quant", "q8", "--context", "32", "--predictor", "none")
    ended = cli("compile", tiny_model, "-o", tmp_path / "artifact", *words)
    assert ended.code == 0
    assert ended.err.splitlines() == [
        f"the plan is for {planned}, but this compiles for {compiled}; its figures do not hold"
        for planned, compiled in (
            ("weights in q4m", "q8"),
            ("a context of 256", "32"),
            ("predictor exact", "none"),
        )
    ]


def test_compile_refuses_unfit_plans(cli: Cli, tiny_model: Path, tiny_plan: Path, tmp_path: Path) -> None:
    hot, curve, damaged, other, wrong = (tmp_path / name for name in ("hot", "curve", "damaged", "other", "wrong"))
    hot.write_text('{"0": [1]}')
    assert cli("plan", tiny_model, "--firing", "10%", "--target", "cpu", "-o", curve).code == 0
    damaged.write_bytes(tiny_plan.read_bytes()[:-9])
    content = json.loads(tiny_plan.read_text())
    other.write_text(json.dumps(content | {"fingerprint": "0" * 64}))
    wrong.write_text(json.dumps(content | {"layers": content["layers"][:1]}))
    output = tmp_path / "new" / "artifact"
    for words, message in (
        ((tmp_path / "no",), "no such file"),
        ((tmp_path,), "is no file"),
        ((damaged,), "not readable as JSON"),
        ((hot,), "is not a plan"),
        ((tiny_plan, "--hot", hot), "hot and plan both say"),
        ((curve,), "says nothing of single neurons"),
        ((other,), "is of another model ('tiny-model')"),
        ((wrong,), "1 layers of 200 neurons, but the model has 2 of 200"),
    ):
        assert_refused(cli("compile", tiny_model, "-o", output, "--plan", *words), 2, message)
        assert not output.parent.exists()


def test_shapes_beyond_all_models(cli: Cli, tmp_path: Path) -> None:
    """They are refused before any of it is built or counted."""
    whole = json.loads((BUNDLED_MODEL / "config.json").read_text())
    wide = {"num_attention_heads": 1, "head_dim": None, "hidden_size": 2**18}
    for changes, message in (
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be a whole number above 0, and below 10000"),
        ({"hidden_size": 2**40}, "hidden_size must be a whole number from 1 to"),
        ({"head_dim": 2**20}, "head_dim must be a whole number from 1 to 2048"),
        (wide, "1 heads of 262144 numbers each"),
        ({"vocab_size": 2**31}, "vocab_size must be a whole number from 1 to"),
        ({"hidden_act": "fatrelu", "hidden_act_param": True}, "hidden_act_param"),
        ({"model_type": "gemma"}, "LlamaForCausalLM and the model_type gemma"),
    ):
        (tmp_path / "shape.json").write_text(json.dumps(whole | changes))
        assert_refused(
            cli("plan", "--shape", tmp_path / "shape.json", "--firing", "opt", "--target", "cpu"), 3, message
        )


def test_shapes_need_no_firing_where_every_neuron_is_computed(cli: Cli) -> None:
    found = _plan(cli, "--shape", "tiny-reglu", "--predictor", "none", "--target", "cpu")
    assert found["firing"] == "every neuron"
    assert all(layer["computed"] == layer["neurons"] for layer in found["layers"])
    assert_refused(cli("plan", "--shape", "tiny-reglu", "--target", "cpu"), 2, "--firing says how often")


def test_what_is_read_in_order_is_read_faster_here(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of scattered rows counts for models with predictors alone."""
    monkeypatch.setattr(local, "measure_host", lambda threads: Host(10**10, 2e10, 0.5))
    words = ("--shape", "tiny-reglu", "--firing", "10%")
    dense = _plan(cli, *words[:2], "--predictor", "none")
    assert dense["machine"]["host_efficiency"] == dense["machine"]["host_dense_efficiency"] == HOST_DENSE_EFFICIENCY
    sparse = _plan(cli, *words, "--predictor", "exact")
    assert sparse["machine"]["host_efficiency"] == 0.5
    assert sparse["baselines"]["host"] == pytest.approx(dense["tokens_per_s"], rel=0.02)


def test_mixtures_are_planned_for_this_machine_without_a_gpu(cli: Cli) -> None:
    assert _plan(cli, "--shape", "tiny-mixture", "--firing", "10%")["target"] == "local"
