"""The tables and bars of benchmarks/gpu.py."""

import sys
from typing import Any

from helpers.support import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from _gpu_report import bars, dense_offloading, empty_results, line, merged, text_of

STEP = {"gpu_s": 0.016, "compute_s": 0.01, "hot_s": 0.003, "cold_s": 0.011, "exchange_s": 0.004, "idle_s": 0.002}
MODEL = {
    "model": "m",
    "quant": "q4",
    "budget": 0.5,
    "dense_bytes": 100,
    "hot": 64,
    "resident_layers": 1,
    "skew": True,
    "plan": None,
}


def _results() -> dict[str, Any]:
    """All bars about models are reached but one."""
    speed = {"folder": "speed", "error": 1e-6, "is_right": True, "moved_bytes": 10**8}
    gated = "ffn masked 4096x4096 f16"
    hybrid = {"tokens_per_s": 60.0, "step": STEP, "computed": {"all": 0.052}, "taken_bytes": 49, "threads": 8}
    rows = [("hybrid", hybrid), ("layers_dense", {"tokens_per_s": 10.0}), ("layers", {"tokens_per_s": 20.0})]
    rows += [("copied", {"tokens_per_s": 12.5, "computes": False})]
    return empty_results(3, False) | {
        "machine": {"gpu": "G", "driver": "13.0", "torch": "2"},
        "copy_bytes_per_s": 3e12,
        "cublas_gated_s": 3e-5,
        "kernels": [
            speed | {"label": "ffn masked 28672x8192 q4", "share": 0.1, "seconds": 10**8 / 3e12 / 0.69},
            speed | {"label": gated, "share": 0.7, "seconds": 4e-5},
            speed | {"label": gated, "share": 0.5, "seconds": 2e-5},
            speed | {"label": gated, "share": 0.3, "seconds": 2.5e-5},
        ],
        "models": [MODEL | {"is_right": True, "variant": variant} | row for variant, row in rows],
    }


def _verdicts(results: dict[str, Any]) -> dict[str, tuple[str, bool | None]]:
    return {what: (found, is_met) for what, _, found, is_met in bars(results)}


FIVE = "m q4: hybrid against dense layer offloading, 5.2% computed"
BUDGET_BAR = "m q4: the budget as a multiple of the GPU's memory in use"
CUBLAS = "ffn masked 4096x4096 f16, 50 % firing and less, against cuBLAS"


def test_each_bar_is_met_missed_or_undecided() -> None:
    results = _results()
    verdicts = _verdicts(results)
    assert verdicts["ffn masked 28672x8192 q4, 10 % firing"] == ("69%", False)
    assert verdicts["ffn masked 28672x8192 f16, 10 % firing"] == ("", None)
    # The worst of the shares from 50 % down.
    assert verdicts[CUBLAS] == ("1.20 ×", True)
    assert verdicts["kernels equal eager PyTorch"][1] is True
    assert verdicts["whole models equal eager PyTorch"][1] is verdicts["whole models give the same tokens"][1] is None
    # Against the faster of the two.
    assert (verdicts[FIVE], verdicts[BUDGET_BAR]) == (("4.8 ×", False), ("1.02", True))
    assert verdicts["m q4: dense; + predictors and operators; + engine; + policy"][1] is None
    results["models"].append(results["models"][0] | {"skew": False, "tokens_per_s": 20.0})
    ablation = _verdicts(results)["m q4: dense; + predictors and operators; + engine; + policy"]
    assert ablation == ("10.00 → 20.00 → 20.00 → 60.00 tokens/s", False)
    assert "all on the CPU" not in text_of(results)
    for row in results["models"]:
        row["hot"] = 0
    ablation = _verdicts(results)["m q4: dense; + predictors and operators; + engine; + policy"]
    assert ablation == ("10.00 → 20.00 → 60.00 tokens/s", True)


def test_bars_without_figures_stay_undecided() -> None:
    results = _results()
    results["models"][0]["computed"] = {"all": 0.11}
    assert _verdicts(results)[FIVE.replace("5.2", "11.0")] == ("", None)
    results = _results()
    results["models"][1] |= {"is_right": None, "reason": "was not come to"}
    del results["models"][1]["tokens_per_s"]
    assert _verdicts(results)[FIVE] == ("", None)
    results["kernels"].append(
        {"label": CUBLAS.partition(",")[0], "folder": "speed", "is_right": None, "reason": "late"}
    )
    verdicts = _verdicts(results)
    assert verdicts[CUBLAS] == ("", None) and verdicts["kernels equal eager PyTorch"][1] is None
    assert "was not come to" in text_of(results) and "late" in text_of(results)


def test_wrong_results_meet_no_bar() -> None:
    results = _results()
    for row in (results["models"][0], results["kernels"][2]):
        row["is_right"] = False
    verdicts = _verdicts(results)
    assert [verdicts[name] for name in (FIVE, BUDGET_BAR, CUBLAS)] == [("wrong", False)] * 3
    assert verdicts["kernels equal eager PyTorch"] == (
        f"4, the worst 1.0e-06 (ffn masked 28672x8192 q4); wrong: {CUBLAS.partition(',')[0]}",
        False,
    )


def test_results_of_two_runs_are_merged() -> None:
    first, second = _results(), _results()
    for row in first["models"]:
        row |= {"is_right": None, "reason": "was not come to"}
    second["kernels"] = []
    both = merged([first, second])
    assert both["kernels"] == first["kernels"] and both["models"] == second["models"]
    assert both["copy_bytes_per_s"] == 3e12


def test_a_row_has_the_parts_of_a_step() -> None:
    results = _results()
    row = results["models"][0] | {"prompts": {"64": 118.0, "512": 120.24, "1536": None}, "host_bytes_per_s": 2e11}
    text = line(row, results)
    assert "GPU ms 16.00, of it computing 10.00, hot ms 3.00, exchange ms 4.00, idle ms 2.00" in text
    assert "cold, host ms 11.00, host GB/s 200, prompt tokens/s 64: 118.0, 512: 120.2" in text
    assert "1536" not in text and "threads 8" in text


def test_threads_are_compared_at_their_best() -> None:
    """Each contender with the number of threads that is best for it; a wrong row spoils its contender."""
    results = _results()
    hybrid, dense = results["models"][0], results["models"][1]
    results["models"] += [hybrid | {"threads": 16, "tokens_per_s": 50.0}, dense | {"threads": 16, "tokens_per_s": 15.0}]
    assert _verdicts(results)[FIVE] == ("4.0 ×", False)
    assert dense_offloading(results["models"], hybrid) == {"layers_dense": 15.0, "copied": 12.5}
    results["models"].append(hybrid | {"threads": 4, "is_right": False})
    assert _verdicts(results)[FIVE] == ("wrong", False)


def test_planned_models_are_compared_at_equal_memory() -> None:
    results = _results()
    planned = [row | {"variant": f"{row['variant']}_4090"} for row in results["models"][:2]]
    results["models"] += [planned[0] | {"tokens_per_s": 30.0}, planned[1] | {"tokens_per_s": 20.0}]
    assert dense_offloading(results["models"], planned[0]) == {"layers_dense_4090": 20.0}
    text = text_of(results)
    assert "memory of a 4090: hybrid, 64 neurons of each layer hot, as planned" in text and "1.50 ×" in text
    # Bars are about what was not planned.
    assert _verdicts(results)[FIVE] == ("4.8 ×", False)


def test_the_heading_has_what_was_measured_of_the_machine() -> None:
    results = _results() | {
        "ping_pong": {"rounds": 10_000, "p50_s": 2.5e-6, "p99_s": 4e-6},
        "host_bytes_per_s": {"8": 1.5e11, "16": 2.1e11},
    }
    heading = text_of(results).splitlines()[0]
    assert "10000 exchanges of host and GPU: 2.5 µs in the median, 4.0 µs for 99 %" in heading
    assert "150 GB/s of the host's memory with 8 threads, 210 GB/s of the host's memory with 16 threads" in heading


def test_weights_on_the_host_are_rows_of_their_own() -> None:
    first, second = empty_results(3, False), empty_results(3, False)
    row = {"label": "linear", "folder": "speed", "error": 1e-6, "moved_bytes": 5e7, "is_right": True}
    on_host = row | {"seconds": 1e-3, "weights": "host"}
    first["kernels"] = [row | {"seconds": 1e-5}, on_host | {"is_right": None, "reason": "late"}]
    second["kernels"] = [on_host]
    assert [each.get("weights") for each in merged([first, second])["kernels"]] == [None, "host"]
    assert line(on_host, first | {"copy_bytes_per_s": 4e12}) == (
        "linear, weights on the host: right yes, error 1.0e-06, µs 1000.0, GB/s 50"
    )
