"""The page: what is on it, that it needs nothing else, and that no name breaks it."""

import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from helpers.report_folders import FINGERPRINT, curve, predictor_row, write_artifact, write_predictors, write_profile
from helpers.report_pages import Page, checked_page
from picompile.errors import UsageError
from picompile.predictors.train.choose import curves
from picompile.predictors.train.data import measure_curve
from picompile.report.page import read_sources, render_report
from picompile.report.predictors import read_candidates


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A profile, predictors and an artifact, with all that can be known of them."""
    base = tmp_path_factory.mktemp("report")
    rows = [predictor_row(0, 1, kind="exact"), predictor_row(1, 1), predictor_row(2, 1)]
    accuracy = {
        "bound": 0.001,
        "dense_perplexity": 20.0,
        "perplexity": 20.01,
        "rounds": 3,
        "targets": [0.995, 0.9975, 0.9985],
        "layers": [
            {"layer": 0, "missed_energy": 0.0},
            {"layer": 1, "missed_energy": 0.002},
            {"layer": 2, "missed_energy": 0.004},
        ],
    }
    model = {"fingerprint": FINGERPRINT, "name": "some-model", "parameters": 10_000}
    write_profile(base / "profile", seed=1)
    write_predictors(
        base / "predictors", rows, accuracy=accuracy, model=model, curves=[curve(1, 4), curve(1, 8), curve(2, 8)]
    )
    accuracy = {"dense_perplexity": 30.0, "perplexity": 30.3, "bound": 0.001, "tokens": 99, "layers": rows[1:]}
    line = {"title": "weights in q4", "perplexity": 30.2, "relative_change": 0.0067, "added_change": 0.0067}
    line |= {"relative_change_interval": [0.005, 0.0081], "kl_nats": 0.0123, "same_top_share": 0.9}
    compared = {"checkpoint_perplexity": 29.99, "tokens": 4321, "text": "some prose", "lines": [line]}
    write_artifact(base / "artifact", accuracy=accuracy, checkpoint_accuracy=compared)
    return [base / "profile", base / "predictors", base / "artifact"]


@pytest.fixture(scope="module")
def html(folders: Sequence[Path]) -> str:
    return render_report(read_sources(folders))


def made(folder: Path, rows: Sequence[dict[str, Any]], **changes: Any) -> str:
    write_predictors(folder, rows, **changes)
    return render_report(read_sources([folder]))


def test_each_source_has_a_row_and_a_section(html: str, folders: Sequence[Path]) -> None:
    page = checked_page(html, pictures=12)
    assert page.of("a") == page.of("h2") == [str(folder) for folder in folders]
    assert {"#s1", "#s2", "#s3"} <= set(page.values("href"))
    assert len(page.of("h4")) == 12
    assert render_report(read_sources(folders)) == html


def test_figures_are_in_words_too(html: str) -> None:
    page = Page(html)
    own = sum(predictor_row(layer, 1)["parameters"] for layer in (1, 2))
    for words in ("make 80 % of the firings", "20.0000", "20.0100", "+0.050 %", "2, 1", "+1.000 %", "yes"):
        assert words in page.text
    for words in (f"{own:,} ({own / 100:.2f} %)", "99.75 %", "99.85 %", "0.400 %"):
        assert words in page.text
    # The artifact is beyond its bound.
    assert "no" in page.of("td")
    for row in (predictor_row(1, 1), predictor_row(2, 1)):
        assert {str(row["rank"]), f"{100 * row['weighted_recall']:.2f} %"} <= set(page.of("td"))
    # The comparison with the checkpoint.
    text = " ".join(page.text.split())
    assert "on 4,321 tokens of some prose" in text and "checkpoint in float32 29.9900" in text
    assert "+ weights in q4 30.2000 +0.670 % +0.500 % to +0.810 % +0.670 % 0.012300 90.00 %" in text
    # Pictures say what is pointed at.
    titles = "\n".join(page.of("title"))
    assert re.search(r"^layer 0: [\d.]+ % of the neurons make 80 % of the firings$", titles, re.MULTILINE)
    assert "layer 1: rank 8, stream" in titles
    assert f"taken: learned, rank {predictor_row(1, 1)['rank']}: " in titles


EVIL = '</title></svg><script>alert("x")</script>&<b>\'$a_1$'


def test_names_are_escaped(tmp_path: Path) -> None:
    rows = [{**predictor_row(0, 3), "kind": "learned"}, {**predictor_row(1, 3, kind="none"), "kind": EVIL}]
    curves = [{**curve(0, 4), "input": EVIL, "kind": EVIL}]
    accuracy = {
        "perplexity": 3.0,
        "text": EVIL,
        "rounds": EVIL,
        "targets": [EVIL, 1],
        "layers": [EVIL, {"layer": EVIL}],
    }
    folder = tmp_path / "<i>\"quoted\" & 'odd'"
    write_predictors(folder, rows, curves=curves, accuracy=accuracy, model={"fingerprint": EVIL, "name": EVIL})
    write_profile(tmp_path / "profile", seed=1, model={"fingerprint": EVIL, "name": EVIL, "hidden": 5})
    write_artifact(
        tmp_path / "artifact",
        accuracy={"text": EVIL, "layers": [], "perplexity": 2.0},
        checkpoint_accuracy={"text": EVIL, "tokens": EVIL, "lines": [EVIL, {"title": EVIL, "kl_nats_interval": EVIL}]},
    )
    program = (tmp_path / "artifact" / "program.json").read_text().replace('"head"', '"<b>\\ud800\\u0000$x$"')
    (tmp_path / "artifact" / "program.json").write_text(program.replace('"embedding"', '"\\u4e2d<u>"'))
    html = render_report(read_sources([folder, tmp_path / "profile", tmp_path / "artifact"]))
    assert "<script" not in html
    for tag in ("<i>", "<b>", "<u>"):
        assert tag not in html
    page = Page(html)
    assert EVIL in page.text
    assert "<i>\"quoted\" & 'odd'" in page.text
    html.encode("utf-8")


def test_predictors_without_figures(tmp_path: Path) -> None:
    """Imported ones: no figures, no accuracy check, no curves; the profile of their model knows how layers fire."""
    rows = [predictor_row(layer, 2, measured=False) for layer in range(3)]
    alone = Page(made(tmp_path / "alone", rows))
    assert alone.of("h4") == [] and "recall" not in alone.of("th")
    write_profile(tmp_path / "profile", seed=4)
    write_profile(tmp_path / "other", seed=4, model={"fingerprint": "00", "name": "another", "hidden": 5})
    for profile, drawn in (("profile", True), ("other", False)):
        page = Page(render_report(read_sources([tmp_path / "alone", tmp_path / profile])))
        assert ("Rank against sparsity" in page.of("h4")) is drawn


def test_curves_of_another_form_are_skipped(tmp_path: Path) -> None:
    odd = [None, {}, {"layer": 0, "rank": 1, "points": []}, {"points": [1, {}]}, "x"]
    accuracy = {"layers": odd, "targets": odd}
    page = Page(made(tmp_path / "predictors", [predictor_row(0, 9)], curves=odd, accuracy=accuracy))
    assert len(page.of("h4")) == 4 and "layer 0" not in page.of("h4")


def test_curves_of_training_are_drawn(tmp_path: Path) -> None:
    """The report reads what training writes of a candidate."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.randn(64, 37, generator=generator)
    contribution = (scores + 0.5 * torch.randn(64, 37, generator=generator)).clamp_min(0).half()
    candidates = [
        SimpleNamespace(kind=kind, input=input, rank=rank, parameters=1, curve=measure_curve(iter([(s, contribution)])))
        for kind, input, rank, s in (("learned", "block", 4, scores), ("sign", None, None, -scores))
    ]
    result: Any = SimpleNamespace(layer=0, candidates=candidates)
    learned, sign = read_candidates(curves([result]))
    assert (learned.layer, learned.label, learned.rank) == (0, "learned, block", 4)
    assert (sign.label, sign.rank) == ("sign", None)
    recalls = [point.weighted_recall for point in learned.points]
    assert len(recalls) > 5 and recalls == sorted(recalls)
    # Scores that say the contrary compute more for the same.
    assert min(point.computed_ratio for point in sign.points) > learned.points[0].computed_ratio
    page = Page(made(tmp_path / "predictors", [predictor_row(0, 9)], curves=curves([result])))
    assert {"layer 0: rank 4, learned, block", "layer 0: sign"} <= set(page.of("title"))


def test_counts_that_were_imported_are_drawn(tmp_path: Path) -> None:
    rows = [predictor_row(layer, 2, kind="learned-relu", measured=False) for layer in range(2)]
    write_predictors(tmp_path / "imported", rows)
    folder = tmp_path / "imported" / "layers"
    folder.mkdir()
    counts = np.array([50, 100, 700, 100, 50], np.int64)
    for layer in range(2):
        save_file({"counts": counts}, folder / f"{layer:03d}.safetensors")
    page = Page(render_report(read_sources([tmp_path / "imported"])))
    assert page.of("h4") == ["Who makes the firings", "Rank against skewness"]
    assert "70.0 %" in page.of("td")
    assert "layer 1: 40.0 % of the neurons make 80 % of the firings" in page.of("title")
    save_file({"counts": -counts}, folder / "001.safetensors")
    with pytest.raises(UsageError, match="holds no counts"):
        render_report(read_sources([tmp_path / "imported"]))


def test_a_model_in_which_no_neuron_fires(tmp_path: Path) -> None:
    write_profile(tmp_path, seed=1, layers=1, neurons=3)
    file = tmp_path / "layers" / "000.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "counts": 0 * tensors["counts"], "contribution": 0 * tensors["contribution"]}, file)
    page = Page(render_report(read_sources([tmp_path])))
    assert "0.00 %" in page.text and "nan" not in page.text
    assert "3 in 1 layer" in page.of("dd")
    # Of no firings nobody makes 80 %, no axis of shares goes below zero, and that of layers names no tenths.
    assert "layer 0: nothing fired" in page.of("title")
    assert not any(text.startswith("−") or text == "0.1" for text in page.of("text"))


def test_the_measure_of_thresholds_is_told(tmp_path: Path) -> None:
    search = {
        "accuracy_bound": 0.01,
        "silenced_share": 0.5,
        "dense_perplexity": 9.0,
        "perplexity": 9.01,
        "tried": {"0.5": 9.01},
    }
    for by in ("magnitude", "contribution"):
        write_profile(tmp_path / by, seed=1, layers=1, thresholds=search | {"by": by})
        page = Page(render_report(read_sources([tmp_path / by])))
        assert by in page.of("dd") and f"the same quantile of its {by}s" in page.text
