"""`compile --checkpoint-bound`, and what `inspect` and `report` show of it and of rounding."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.refusals import assert_refused
from helpers.support import BuildOnce, Cli, compile_for_test
from picompile.cli.accuracy_show import comparison_text, show_comparison
from picompile.cli.weights_show import weights_text

TOKENS = {"context": 64, "check_tokens": 400}


@pytest.fixture(scope="module")
def artifact(build_once: BuildOnce, tiny_model: Path) -> Path:
    """`tiny_model` with the kernels of `tiny_artifact`, compared with its checkpoint. Tests must not change it."""
    return build_once(
        "tiny-compared",
        lambda folder: compile_for_test(tiny_model, folder, quant="f16", checkpoint_bound=0.5, **TOKENS),
    )


def _table(text: str) -> list[str]:
    """The lines of the table below its title."""
    lines = text.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("with "))
    return lines[start : start + 5]


@pytest.mark.slow("compiles a model; the fast tests have an artifact that was compared")
def test_compile_prints_one_table(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "artifact"
    options = ["--quant", "q8", "--context", "64", "--check-tokens", "400", "--checkpoint-bound", "report"]
    ended = cli("compile", tiny_model, "-o", output, *options)
    assert (ended.code, ended.err) == (0, "")
    comparison = json.loads((output / "report.json").read_text())["checkpoint_accuracy"]
    summary, title, *table = ended.out.splitlines()
    assert summary.startswith(f"{output}: ")
    assert title.startswith(f"accuracy against the checkpoint, on {comparison['tokens']} tokens of Python ")
    assert table == _table(ended.out)
    titles = ["with", "checkpoint in float32", "+ weights in q8", "+ KV cache in f16", "+ runtime arithmetic"]
    assert [line[: len(name)] for line, name in zip(table, titles, strict=True)] == titles
    assert "\x1b" not in ended.out
    last = table[-1]
    assert f"{comparison['perplexity']:.4f}" in last
    assert f"{100 * comparison['relative_change']:+.3f} %" in last
    assert f"{comparison['kl_nats']:.6f}" in last
    shown = cli("inspect", output)
    assert _table(shown.out) == table


def test_inspect_and_report_have_the_figures(cli: Cli, artifact: Path, tmp_path: Path) -> None:
    facts = json.loads(cli("inspect", artifact, "--json").out)
    comparison = facts["checkpoint_accuracy"]
    assert comparison == json.loads((artifact / "report.json").read_text())["checkpoint_accuracy"]
    assert comparison["bound"] == 0.5 and facts["accuracy"] is None
    assert f"perplexity {100 * comparison['relative_change']:+.3f} % (95 %: " in cli("inspect", artifact).out
    assert cli("report", artifact, "-o", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "What it costs against the checkpoint" in page
    assert f"{comparison['perplexity']:.4f}" in page and f"{comparison['kl_nats']:.6f}" in page


def test_artifacts_that_were_not_compared(cli: Cli, tiny_artifact: Path) -> None:
    assert json.loads(cli("inspect", tiny_artifact, "--json").out)["checkpoint_accuracy"] is None
    assert "against the checkpoint" not in cli("inspect", tiny_artifact).out


def test_bounds_that_are_no_share(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    for text in ("150%", "-1%", "most", "nan", ""):
        assert_refused(
            cli("compile", tiny_model, "-o", tmp_path / "artifact", f"--checkpoint-bound={text}"),
            2,
            "--checkpoint-bound",
        )


DAMAGED: list[dict[str, Any]] = [
    {},
    {"tokens": "many", "checkpoint_perplexity": 2.0, "lines": []},
    {"tokens": 3, "checkpoint_perplexity": 2.0, "lines": [{}]},
    {"tokens": 3, "checkpoint_perplexity": "high", "lines": 4},
    {"tokens": 3, "relative_change": 0.1, "kl_nats": 0.1, "relative_change_interval": [1]},
]


def test_a_damaged_report_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for comparison in DAMAGED:
        assert comparison_text(comparison) == "cannot be read"
        show_comparison(comparison)
        assert capsys.readouterr().out == "accuracy against the checkpoint: cannot be read\n"


def test_figures_that_were_not_finite(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"title": "x", "perplexity": None, "relative_change": None, "relative_change_interval": None}
    line |= {"added_change": None, "kl_nats": None, "kl_nats_interval": [0.1, None], "added_kl_nats": None}
    whole = {"tokens": 1, "text": "t", "checkpoint_perplexity": None, "lines": [{**line, "same_top_share": 0.5}]}
    show_comparison(whole)
    shown = capsys.readouterr().out.splitlines()[-1]
    assert " ".join(shown.split()) == "+ x – – – – 0.100000 to – – 50.00 %"


def test_formats_and_rounding_in_a_line() -> None:
    calibrated = {"method": "calibrated", "tokens": 2048, "bits_per_weight": 5.2, "loss_nats": 0.00123}
    mixed = (
        "1 in q8, 1 in q4; 5.200 bits a weight, estimated to lose 0.00123 nats a token; rounded for 2,048 tokens "
        "of calibration text at most"
    )
    unread = "; how they were rounded cannot be read"
    for formats, rounding, text in (
        ({"a": "q4", "b": "q6", "c": "q4"}, {"method": "nearest"}, "2 in q4, 1 in q6; rounded to the nearest"),
        (
            {"a": "q4", "b": "f16"},
            {"method": "stored", "rounded": {"q8": 1, "q6": 2}},
            "1 in q4, 1 in f16; as the checkpoint has them, but for 2 matrices in q6, 1 matrix in q8",
        ),
        ({"a": "q4"}, {"method": "stored", "rounded": {}}, "1 in q4; as the checkpoint has them"),
        ({"a": "q8", "b": "q4"}, calibrated, mixed),
        ({"a": []}, {"method": "calibrated"}, f"1 in []{unread}"),
    ):
        assert weights_text(formats, rounding) == text  # type: ignore[arg-type]
