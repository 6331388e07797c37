"""The tables and bars of benchmarks.gpu."""

from typing import Any

from benchmarks.gpu.report import bars, empty_results, merged, text_of

STEP = {"gpu_s": 0.016, "compute_s": 0.01, "hot_s": 0.003, "cold_s": 0.011, "exchange_s": 0.004, "idle_s": 0.002}
MODEL = {
    "model": "m", "quant": "q4", "budget": 0.5, "dense_bytes": 100, "hot": 64, "resident_layers": 1, "plan": None,
}  # fmt: skip


def _results() -> dict[str, Any]:
    """All bars about models are reached but one."""
    speed = {"folder": "speed", "error": 1e-6, "is_right": True, "moved_bytes": 10**8}
    gated = "ffn masked 4096x4096 f16"
    hybrid = {"tokens_per_s": 60.0, "step": STEP, "computed": {"all": 0.052}, "taken_bytes": 49, "threads": 8}
    rows = [("hybrid", hybrid), ("layers_dense", {"tokens_per_s": 10.0})]
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


def test_bars_without_figures_stay_undecided() -> None:
    results = _results()
    del results["models"][1]["tokens_per_s"]
    label = CUBLAS.partition(",")[0]
    results["kernels"].append({"label": label, "folder": "speed", "is_right": None, "reason": "late"})
    verdicts = _verdicts(results)
    assert [verdicts[name] for name in (FIVE, CUBLAS)] == [("", None)] * 2
    assert verdicts["kernels equal eager PyTorch"][1] is None and "late" in text_of(results)
    # The bar is for models that compute 10 % at most.
    results = _results()
    results["models"][0]["computed"] = {"all": 0.11}
    assert _verdicts(results)[FIVE.replace("5.2", "11.0")] == ("", None)


def test_wrong_results_meet_no_bar() -> None:
    results = _results()
    for row in (results["models"][0], results["kernels"][2]):
        row["is_right"] = False
    verdicts = _verdicts(results)
    assert [verdicts[name] for name in (FIVE, BUDGET_BAR, CUBLAS)] == [("wrong", False)] * 3
    text, is_met = verdicts["kernels equal eager PyTorch"]
    assert is_met is False and f"wrong: {CUBLAS.partition(',')[0]}" in text


def test_results_of_two_runs_are_merged() -> None:
    first, second = _results(), _results()
    for row in first["models"]:
        row |= {"is_right": None, "reason": "was not come to"}
    second["kernels"] = []
    both = merged([first, second])
    assert both["kernels"] == first["kernels"] and both["models"] == second["models"]
    assert both["copy_bytes_per_s"] == 3e12
