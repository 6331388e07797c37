"""Plans on the page: every value is the plan's, bars are as long as they should be, and damaged plans are refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest

from helpers.report_folders import write_artifact
from helpers.report_pages import Page, checked_page
from helpers.report_plans import GPU_BYTES, HOST_BYTES, MARGIN, random_plan, write_plan_file
from picompile.errors import UsageError
from picompile.placement.plan import MemoryRow, Plan
from picompile.report.page import read_sources, render_report
from picompile.report.plan_pictures import memory_picture, split_picture, time_picture
from picompile_runtime import ArtifactError

UNITS = {"ns": 1e-9, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
PARTS = {
    "attention": "attention_s",
    "KV cache": "kv_cache_s",
    "predictor": "predict_s",
    "hot neurons": "hot_s",
    "cold neurons": "cold_s",
    "transfer": "exchange_s",
}


def page_of(folder: Path, plan: Plan) -> str:
    return render_report(read_sources([write_plan_file(folder / "plan.json", plan)]))


def hovers(svg: str) -> dict[str, tuple[float, float, float, float]]:
    """Text → left, top, right and bottom of the bar or line that it is of."""
    found = {}
    for element in ElementTree.fromstring(svg).iter("g"):
        if element.get("class") == "hover":
            title, path = element.find("title"), element.find("path")
            assert title is not None
            assert title.text
            text = title.text.replace("\u00a0", " ")
            values = [] if path is None else [float(value) for value in re.findall(r"-?[\d.]+", path.get("d", ""))]
            x, y = values[::2], values[1::2]
            assert text not in found
            found[text] = (min(x), min(y), max(x), max(y)) if values else (0.0, 0.0, 0.0, 0.0)
    return found


def seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * UNITS[unit]


def test_hidden_predictions_are_no_part_of_a_layers_time(tmp_path: Path) -> None:
    """The picture leaves them out, and the table says how much is hidden; it has no such column if nothing is."""
    plan = random_plan(2, 2)
    assert "of it hidden" not in page_of(tmp_path, plan)
    first, second = plan.layers
    hidden = replace(second, predict_s=4e-4, predict_hidden_s=3e-4, total_s=second.total_s - second.predict_s + 1e-4)
    early = replace(plan, layers=(first, hidden))
    assert "of it hidden" in page_of(tmp_path, early)
    bars = {}
    for text, (_, top, _, bottom) in hovers(str(time_picture("t", early).svg)).items():
        if "layer 1: predictor" in text:
            assert "400 µs, 300 µs of it in the layer before, of " in text
            bars["predictor"] = bottom - top
        elif "layer 1: attention" in text:
            bars["attention"] = bottom - top
    assert bars["predictor"] / bars["attention"] == pytest.approx(1e-4 / second.attention_s, rel=0.02)


@pytest.mark.parametrize("layers", [1, 7])
def test_the_time_picture_shows_the_plans_times(layers: int) -> None:
    plan = random_plan(layers, layers)
    bars = {}
    for text, (_, top, _, bottom) in hovers(str(time_picture("t", plan).svg)).items():
        found = re.fullmatch(r"layer (\d+): ([\w ]+?)(?: on the (\w+))?, ([\d.]+ \w+) of ([\d.]+ \w+)", text)
        assert found, text
        layer = plan.layers[int(found[1])]
        assert seconds(found[4]) == pytest.approx(getattr(layer, PARTS[found[2]]), rel=6e-3)
        assert seconds(found[5]) == pytest.approx(layer.total_s, rel=6e-3)
        assert found[3] in ({"accelerator": "GPU", "host": "host"}[layer.attention], None)
        bars[layer.layer, found[2]] = bottom - top
    times = {(layer.layer, part): getattr(layer, name) for layer in plan.layers for part, name in PARTS.items()}
    expected = {key: time_s for key, time_s in times.items() if time_s}
    assert set(bars) == set(expected)
    pixels_per_s = sum(bars.values()) / sum(expected.values())
    for key, height in bars.items():
        assert height == pytest.approx(pixels_per_s * expected[key], abs=0.05)


def test_the_split_picture_shows_the_plans_shares() -> None:
    plan = random_plan(56, 6)
    svg = str(split_picture("s", plan).svg).replace("\u00a0", " ")
    for layer in plan.layers:
        text = (
            f"layer {layer.layer}: {layer.hot_neurons:,} of {layer.neurons:,} neurons "
            f"({100 * layer.hot_neurons / layer.neurons:.1f} %), "
            f"{100 * layer.hot_computed / layer.computed:.1f} % of the computed ones"
        )
        # Once for the bar and once for the point.
        assert svg.count(f"<title>{text}</title>") == 2
    # Layers that compute nothing have no share.
    nothing = replace(plan.layers[0], computed=0.0, hot_computed=0.0)
    svg = str(split_picture("s", replace(plan, layers=(nothing,))).svg)
    assert "of the computed" not in svg and "–" in svg


def test_the_memory_picture_shows_the_plans_memory() -> None:
    plan = random_plan(5)
    expected = {(row.device, row.what): float(row.bytes) for row in plan.memory}
    expected |= {("accelerator", "limit"): (1 - MARGIN) * GPU_BYTES, ("host", "limit"): (1 - MARGIN) * HOST_BYTES}
    names = {"workspace, tables": {"accelerator": "workspace", "host": "tables"}}
    found = {}
    for text in hovers(str(memory_picture("m", plan).svg)):
        device, what = text.lower().replace("gpu", "accelerator").split(": ")
        match = re.fullmatch(r"(.*?) ?([\d.]+) ([mg]b)( may be taken)?", what)
        assert match, text
        kind = "limit" if match[4] else names.get(match[1], {}).get(device, match[1])
        found[device, kind] = float(match[2]) * {"mb": 1e6, "gb": 1e9}[match[3]]
    assert found == pytest.approx(expected, rel=6e-3)


def test_a_page_of_a_plan(tmp_path: Path) -> None:
    plan = random_plan(10, 40)
    html = page_of(tmp_path, plan)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "svg.fonttype": "path"}):
        assert page_of(tmp_path, plan) == html
    page = checked_page(html, pictures=3)
    assert page.of("h4")[:2] == ["What is on the GPU", "Where a token's time goes"] and len(page.of("h4")) == 3
    # The summary and the facts.
    rate = f"{1 / plan.token_s:.3g}"
    gain, facts = f"{1 / plan.token_s / 2.5:.2f} ×", page.of("dd")
    assert {"4090", rate, "24 GB", gain} <= {*page.of("td")}
    assert any(fact.startswith(f"{rate} tokens/s, ") for fact in facts)
    assert "at most 0.0085 %, by the objective" in facts
    assert f"2.5 tokens/s; the plan is {gain} as fast" in facts
    assert {"the curve some", "5.0 % of each budget is left free"} <= {*facts}
    # Nothing here is of predictors or profiles.
    assert "predicted from datasheets" in page.text and "Recall:" not in page.text


@pytest.mark.filterwarnings("error")
def test_nothing_on_the_gpu(tmp_path: Path) -> None:
    plan = random_plan(12, 3)
    on_host = tuple(replace(random_plan(12, 3).layers[2], layer=number) for number in range(3))
    machine = replace(plan.machine, gpu_bytes=0)
    memory = tuple(row for row in plan.memory if row.device == "host")
    changes: dict[str, Any] = {"layers": on_host, "machine": machine, "memory": memory, "accelerator_budget_bytes": 0}
    page = Page(page_of(tmp_path, replace(plan, head="host", gap=0.0, baselines={"host": 1.0}, **changes)))
    assert page.of("h4") == ["Where a token's time goes", "What it takes of the memory"]
    assert "none" in page.of("dd")
    assert "nothing, by the objective" in page.of("dd")
    # No column and no budget of a GPU that there is not.
    assert "GPU" not in page.of("text")
    assert "GPU" not in page.of("th")


EVIL = "</title></svg><script>alert(1)</script>&<b>'$a_1$"


def test_names_of_a_plan_are_escaped(tmp_path: Path) -> None:
    rows = (MemoryRow("accelerator", EVIL, 10**9), MemoryRow("accelerator", "中\x01" + "x" * 99, 10**8))
    names = dict.fromkeys(("model", "target", "firing", "quant", "predictor"), EVIL)
    html = page_of(tmp_path, random_plan(15, memory=rows, baselines={EVIL: 1.0}, **names))
    assert "<script" not in html
    assert "<b>" not in html
    assert Page(html).of("dd").count(EVIL) == 5


def test_an_artifact_shows_its_plan(tmp_path: Path) -> None:
    plan = random_plan(16, 2, fingerprint="5a" * 32)
    content = json.loads(json.dumps(plan.to_json()))
    for layer in content["layers"]:
        # An artifact has the neurons in its tables.
        del layer["hot"]
    write_artifact(tmp_path / "artifact", plan=content)
    path = write_plan_file(tmp_path / "plan.json", plan)
    # Beside the plan itself, ids are still unlike one another.
    page = checked_page(render_report(read_sources([tmp_path / "artifact", path])), pictures=7)
    assert page.of("a") == [str(tmp_path / "artifact"), str(path)]
    assert page.of("h4").count("Where a token's time goes") == 2
    assert {"predicted tokens/s", "planned for"} <= {text.replace("\n", " ") for text in page.of("th")}
    assert page.of("td").count(f"{1 / plan.token_s:.3g}") == 2


def test_damaged_plans_are_refused(tmp_path: Path) -> None:
    path = write_plan_file(tmp_path / "plan.json", random_plan(17))
    whole = json.loads(path.read_text())
    damages = ({"schema": 99}, {"layers": []}, {"layers": [{}]}, {"machine": 1}, {"token_s": 0})
    damaged: list[Any] = [whole | damage for damage in damages]
    texts = [b"", b"GGUF" + bytes(99), b"[1]", b"{", b'{"format": "other"}', b"\xff\xfe{"]
    for content in (*texts, *(json.dumps(each).encode() for each in damaged)):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=re.escape(str(path))) as raised:
            read_sources([path])
        assert "\n" not in str(raised.value)
    for number, plan in enumerate([*damaged, [], "x", 3, {"format": "picompile-plan"}]):
        write_artifact(tmp_path / str(number), plan=plan)
        with pytest.raises(ArtifactError, match="plan"):
            read_sources([tmp_path / str(number)])
