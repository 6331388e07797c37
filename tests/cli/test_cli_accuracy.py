"""`compile --accuracy` and what `inspect` and `report` show of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.support import BuildOnce, Cli, compile_for_test
from picompile.cli.accuracy_show import comparison_text, show_comparison

TOKENS = {"context": 64, "gate_tokens": 400}


@pytest.fixture(scope="module")
def artifact(build_once: BuildOnce, tiny_model: Path) -> Path:
    """`tiny_model` in q8, compared with its checkpoint. Tests must not change it."""
    return build_once(
        "tiny-compared", lambda folder: compile_for_test(tiny_model, folder, quant="q8", accuracy=0.5, **TOKENS)
    )


def _table(text: str) -> list[str]:
    """The lines of the table below its title."""
    lines = text.splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("with "))
    return lines[start : start + 5]


def test_compile_prints_one_table(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "artifact"
    options = ["--quant", "q8", "--context", "64", "--gate-tokens", "400", "--accuracy", "report"]
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
    # All columns but the first are flush right.
    assert {len(line.rstrip()) for line in table if "checkpoint" not in line} == {len(table[0].rstrip())}
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
    assert set(comparison) == {
        *("bound", "checkpoint_perplexity", "perplexity", "relative_change", "relative_change_interval", "kl_nats"),
        *("kl_nats_interval", "same_top_share", "tokens", "text", "lines"),
    }
    assert f"perplexity {100 * comparison['relative_change']:+.3f} % (95 %: " in cli("inspect", artifact).out
    assert cli("report", artifact, "-o", tmp_path / "page.html").code == 0
    page = (tmp_path / "page.html").read_text()
    assert "What it costs against the checkpoint" in page
    assert f"{comparison['perplexity']:.4f}" in page and f"{comparison['kl_nats']:.6f}" in page
    assert cli("verify", artifact).code == 0
    assert cli("run", artifact, "-p", "a", "-n", "2").code == 0


def test_artifacts_that_were_not_compared(cli: Cli, tiny_artifact: Path) -> None:
    assert json.loads(cli("inspect", tiny_artifact, "--json").out)["checkpoint_accuracy"] is None
    assert "against the checkpoint" not in cli("inspect", tiny_artifact).out


@pytest.mark.parametrize("text", ["150%", "-1%", "most", "nan", ""])
def test_bounds_that_are_no_share(cli: Cli, tiny_model: Path, tmp_path: Path, text: str) -> None:
    ended = cli("compile", tiny_model, "-o", tmp_path / "artifact", f"--accuracy={text}")
    assert (ended.code, ended.out, ended.err.count("\n")) == (2, "", 1)
    assert "--accuracy" in ended.err


DAMAGED: list[dict[str, Any]] = [
    {},
    {"tokens": "many", "checkpoint_perplexity": 2.0, "lines": []},
    {"tokens": 3, "checkpoint_perplexity": 2.0, "lines": [{}]},
    {"tokens": 3, "checkpoint_perplexity": "high", "lines": 4},
    {"tokens": 3, "relative_change": 0.1, "kl_nats": 0.1, "relative_change_interval": [1]},
]


@pytest.mark.parametrize("comparison", DAMAGED)
def test_a_damaged_report_is_told(comparison: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
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
