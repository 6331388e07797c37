"""The page: what is on it, that it needs nothing else, and that no name breaks it."""

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from helpers.report_folders import FINGERPRINT, curve, predictor_row, write_artifact, write_predictors, write_profile
from picompile.errors import UsageError
from picompile.report import read_sources, render_report

VOID = ("meta", "link", "br")


class Page(HTMLParser):
    """The texts of a page by element, its attributes, and that every element ends where it should."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[tuple[str, str]] = []
        self._stack: list[str] = []
        self.feed(html)
        self.close()
        assert self._stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(key, value or "") for key, value in attrs]
        if tag not in VOID:
            self._stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._stack[-1], data.replace("\u00a0", " ").strip()))

    def of(self, tag: str) -> list[str]:
        return [text for element, text in self.texts if element == tag]

    @property
    def text(self) -> str:
        return "\n".join(text for _, text in self.texts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A profile, predictors and an artifact, with all that can be known of them."""
    base = tmp_path_factory.mktemp("report")
    rows = [predictor_row(0, 1, kind="exact"), predictor_row(1, 1), predictor_row(2, 1)]
    gate = {
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
    write_predictors(base / "predictors", rows, gate=gate, model=model, curves=[curve(1, 4), curve(1, 8), curve(2, 8)])
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
    page = Page(html)
    assert page.of("a") == [str(folder) for folder in folders]
    assert [
        value for key, value in page.attributes if key == "href" and value.startswith("#s") and "-" not in value
    ] == [
        "#s1",
        "#s2",
        "#s3",
    ]
    assert page.of("h2") == [str(folder) for folder in folders]
    assert page.of("h4") == [
        "Who makes the firings",
        "How many fire",
        "Rank against sparsity",
        "Rank against skewness",
        "Recall and precision",
        "Computed against firing",
        "What is missed",
        "layer 1",
        "layer 2",
        "Recall and precision",
        "Computed against firing",
        "What the weights take",
    ]


def test_figures_are_in_words_too(html: str) -> None:
    text = Page(html).text
    own = sum(predictor_row(layer, 1)["parameters"] for layer in (1, 2))
    for words in ("make 80 % of the firings", "20.0000", "20.0100", "+0.050 %", "2, 1", "+1.000 %", "yes"):
        assert words in text
    for words in (f"{own:,} ({own / 100:.2f} %)", "99.75 %", "99.85 %", "0.400 %"):
        assert words in text
    # The artifact is beyond its gate.
    assert "no" in Page(html).of("td")
    for row in (predictor_row(1, 1), predictor_row(2, 1)):
        assert str(row["rank"]) in Page(html).of("td")
        assert f"{100 * row['weighted_recall']:.2f} %" in Page(html).of("td")


def test_every_picture_has_a_text(html: str) -> None:
    pictures = html.count("<svg")
    assert pictures == 12
    assert len(re.findall(r'<svg[^>]*role="img"[^>]*aria-labelledby="[^"]+"', html)) == pictures
    assert len(re.findall(r'<desc id="[^"]+">[^<]{20,}</desc>', html)) == pictures
    assert len(Page(html).of("figcaption")) == pictures


def test_ids_are_unique_and_references_resolve(html: str) -> None:
    page = Page(html)
    ids = [value for key, value in page.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    references = {value[1:] for key, value in page.attributes if key == "href" and value.startswith("#")}
    references |= set(re.findall(r"url\(#([^)]+)\)", html))
    assert references <= set(ids)


def test_a_page_loads_nothing(html: str) -> None:
    assert not re.search(r"https?:|@import|url\((?!#)|<script", html)
    assert [value for key, value in Page(html).attributes if key == "src"] == []
    assert "prefers-color-scheme: dark" in html
    assert '<meta name="viewport" content="width=device-width' in html


def test_the_same_sources_give_the_same_bytes(html: str, folders: Sequence[Path]) -> None:
    assert render_report(read_sources(folders)) == html


def test_pictures_point_out_what_they_show(html: str) -> None:
    titles = Page(html).of("title")
    assert any(re.fullmatch(r"layer 0: [\d.]+ % of the neurons make 80 % of the firings", title) for title in titles)
    assert any(re.fullmatch(r"layer 1: rank 8, stream", title) for title in titles)
    rank = predictor_row(1, 1)["rank"]
    assert any(title.startswith(f"taken: learned, rank {rank}: ") for title in titles)


def test_the_comparison_with_the_checkpoint_is_a_table(html: str) -> None:
    text = " ".join(Page(html).text.replace("\u00a0", " ").split())
    assert "What it costs against the checkpoint" in text
    assert "on 4,321 tokens of some prose" in text
    assert "checkpoint in float32 29.9900" in text
    assert "+ weights in q4 30.2000 +0.670 % +0.500 % to +0.810 % +0.670 % 0.012300 – 90.00 %" not in text
    assert "+ weights in q4 30.2000 +0.670 % +0.500 % to +0.810 % +0.670 % 0.012300 90.00 %" in text


EVIL = '</title></svg><script>alert("x")</script>&<b>\'$a_1$'


def test_names_are_escaped(tmp_path: Path) -> None:
    rows = [{**predictor_row(0, 3), "kind": "learned"}, {**predictor_row(1, 3, kind="none"), "kind": EVIL}]
    curves = [{**curve(0, 4), "input": EVIL, "kind": EVIL}]
    gate = {"perplexity": 3.0, "text": EVIL, "rounds": EVIL, "targets": [EVIL, 1], "layers": [EVIL, {"layer": EVIL}]}
    folder = tmp_path / "<i>\"quoted\" & 'odd'"
    write_predictors(folder, rows, curves=curves, gate=gate, model={"fingerprint": EVIL, "name": EVIL})
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
    """Imported ones: no figures, no gate, no curves; the profile of their model knows how layers fire."""
    rows = [predictor_row(layer, 2, measured=False) for layer in range(3)]
    alone = Page(made(tmp_path / "alone", rows))
    assert alone.of("h4") == []
    assert "recall" not in alone.of("th")
    write_profile(tmp_path / "profile", seed=4)
    both = Page(render_report(read_sources([tmp_path / "alone", tmp_path / "profile"])))
    assert both.of("h4")[:2] == ["Rank against sparsity", "Rank against skewness"]
    write_profile(tmp_path / "other", seed=4, model={"fingerprint": "00", "name": "another", "hidden": 5})
    assert (
        "Rank against sparsity" not in Page(render_report(read_sources([tmp_path / "alone", tmp_path / "other"]))).text
    )


@pytest.mark.parametrize(
    "curves", [[None], [{}], [{"layer": 0, "rank": 1, "points": []}], [{"points": [1, {}]}], ["x"]]
)
def test_curves_of_another_form_are_skipped(tmp_path: Path, curves: list[Any]) -> None:
    rows = [predictor_row(0, 9)]
    assert "Trade-off" not in made(
        tmp_path / "predictors", rows, curves=curves, gate={"layers": curves, "targets": curves}
    )


def test_curves_of_training_are_drawn(tmp_path: Path) -> None:
    """The report reads what training writes of a candidate."""
    import torch

    from picompile.predictors.train.choose import curves
    from picompile.predictors.train.data import measure_curve
    from picompile.report.predictors import read_candidates

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
    assert len(recalls) > 5
    assert recalls == sorted(recalls)
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


def test_lossless_kinds_have_no_rank(tmp_path: Path) -> None:
    page = Page(made(tmp_path / "predictors", [predictor_row(0, 9, kind="exact"), predictor_row(1, 9, kind="sign")]))
    assert page.of("h4") == ["Recall and precision", "Computed against firing"]
    assert "rank" not in page.of("th")


def test_many_layers_are_folded(tmp_path: Path) -> None:
    rows = [predictor_row(layer, 9, kind="exact") for layer in range(40)]
    html = made(tmp_path / "predictors", rows)
    assert html.count("<details>") == 1
    assert Page(html).of("summary") == ["Each layer"]


def test_a_model_in_which_no_neuron_fires(tmp_path: Path) -> None:
    write_profile(tmp_path, seed=1, layers=1, neurons=3)
    file = tmp_path / "layers" / "000.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "counts": 0 * tensors["counts"], "contribution": 0 * tensors["contribution"]}, file)
    page = Page(render_report(read_sources([tmp_path])))
    assert "0.00 %" in page.text
    assert "nan" not in page.text
    # Of no firings nobody makes 80 %, and no axis of shares goes below zero.
    assert "layer 0: nothing fired" in page.of("title")
    assert "0.0 % of the neurons" not in page.text
    assert not any(text.startswith("−") for text in page.of("text"))


@pytest.mark.filterwarnings("error")
def test_predictors_of_layers_in_which_no_neuron_fires(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("firing_share", "computed_share", "missed_energy"), 0.0)
    rows = [{**predictor_row(layer, 9, kind="exact"), **nothing} for layer in range(2)]
    gate = {"perplexity": 3.0, "layers": [{"layer": layer, "missed_energy": 0.0} for layer in range(2)]}
    page = Page(made(tmp_path / "predictors", rows, gate=gate))
    assert page.of("h4") == ["Recall and precision", "Computed against firing"]
    assert not any(text.startswith("−") for text in page.of("text"))


def test_a_model_of_one_layer(tmp_path: Path) -> None:
    write_profile(tmp_path, seed=1, layers=1, neurons=50)
    page = Page(render_report(read_sources([tmp_path])))
    assert "50 in 1 layer" in page.of("dd")
    # The axis of layers names the only one, and no tenths of it.
    assert not any(text in page.of("text") for text in ("0.1", "−0.1"))


def test_the_measure_of_thresholds_is_told(tmp_path: Path) -> None:
    search = {"gate": 0.01, "silenced_share": 0.5, "dense_perplexity": 9.0, "perplexity": 9.01, "tried": {"0.5": 9.01}}
    texts = {}
    for by in ("magnitude", "contribution"):
        write_profile(tmp_path / by, seed=1, layers=1, thresholds=search | {"by": by})
        page = Page(render_report(read_sources([tmp_path / by])))
        assert by in page.of("dd")
        assert f"the same quantile of its {by}s" in page.text
        texts[by] = page.text
    assert "fires on a token when the magnitude" in texts["magnitude"]
    assert "fires on a token when its contribution" in texts["contribution"]


def test_the_worst_of_many_layers_are_named(tmp_path: Path) -> None:
    gate = {"perplexity": 3.0, "layers": [{"layer": layer, "missed_energy": 2**-7} for layer in range(40)]}
    page = Page(made(tmp_path / "predictors", [predictor_row(layer, 9) for layer in range(40)], gate=gate))
    assert "0, 1, 2, 3, 4, 5, 6, 7 and 24 more" in page.of("td")


@pytest.mark.filterwarnings("error")
def test_numbers_that_are_too_large_are_left_out(tmp_path: Path) -> None:
    row = {**predictor_row(0, 1), "firing_share": 1e-300}
    gate = {"dense_perplexity": 1e-200, "perplexity": 1e300, "rounds": 10**30, "layers": [_missed(1e308)]}
    curves = [{**curve(0, 4), "layer": 10**400}, {**curve(0, 4), "rank": 10**400}]
    page = Page(made(tmp_path / "predictors", [row], gate=gate, curves=curves))
    assert not re.search(r"\d{20}", page.text)
    assert "inf" not in page.text


def _missed(energy: float) -> dict[str, float]:
    return {"layer": 0, "missed_energy": energy}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["\ud800", "\x01", "中", "x" * 999])
def test_names_that_no_font_has_are_drawn_as_marks(tmp_path: Path, kind: str) -> None:
    candidate = {**curve(0, 4), "kind": kind, "rank": None}
    html = made(tmp_path / "predictors", [predictor_row(0, 9)], curves=[candidate])
    assert ("?, stream" if len(kind) == 1 else f"{24 * 'x'}, stream") in Page(html).of("text")


def test_lines_of_several_inputs_are_told_apart(tmp_path: Path) -> None:
    curves = [{**curve(0, 4), "kind": "learned", "input": place} for place in ("stream", "block")]
    page = Page(made(tmp_path / "predictors", [predictor_row(0, 9)], curves=curves))
    assert any(text.endswith(" · solid: learned, block, dashed: learned, stream") for text in page.of("figcaption"))
