"""Compilations that round for text, or choose a format for each matrix."""

import json
from pathlib import Path

import pytest

from helpers.decoders import Llama
from helpers.support import Cli
from picompile import CompileOptions, capture_module
from picompile.compile import compile_model
from picompile.errors import UsageError
from picompile_passes.formats import FORMATS, Codec

_TEXT = "The compiler rounds weights for the text that they will meet. " * 200


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(_TEXT)
    return path


def _compile(model: Path, output: Path, **options: object) -> dict[str, object]:
    fewer = {"rounding_tokens": 1024} if "calibration" in options and "rounding" not in options else {}
    compile_model(model, output, CompileOptions(context=32, **fewer, **options))  # type: ignore[arg-type]
    report: dict[str, object] = json.loads((output / "report.json").read_text())
    return report


def _weights(artifact: Path) -> bytes:
    return (artifact / "weights.safetensors").read_bytes()


@pytest.mark.slow("rounds and compiles a model")
def test_text_or_a_work_folder_calibrates(tiny_model: Path, text: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    _compile(tiny_model, tmp_path / "plain", quant="q4m")
    _compile(tiny_model, tmp_path / "nearest", quant="q4m", rounding="nearest", work=work)
    _compile(tiny_model, tmp_path / "first", quant="q4m", calibration=(text,), work=work)
    made = {path: path.stat().st_mtime_ns for path in (work / "rounding").rglob("*.safetensors")}
    _compile(tiny_model, tmp_path / "second", quant="q4m", calibration=(text,), work=work)
    _compile(tiny_model, tmp_path / "without", quant="q4m", calibration=(text,))
    assert made
    assert made == {path: path.stat().st_mtime_ns for path in (work / "rounding").rglob("*.safetensors")}
    plain, nearest, first, second, without = (
        _weights(tmp_path / name) for name in ("plain", "nearest", "first", "second", "without")
    )
    assert plain == nearest
    assert first == second == without
    assert first != plain


@pytest.mark.slow("rounds and compiles a model")
def test_a_budget_gives_each_matrix_a_format(tiny_model: Path, text: Path, tmp_path: Path) -> None:
    report = _compile(tiny_model, tmp_path / "artifact", quant="5.5bpw", calibration=(text,), work=tmp_path / "work")
    forms: dict[str, str] = report["weight_formats"]  # type: ignore[assignment]
    assert set(forms.values()) <= {"q4", "q4m", "q6", "q8"}
    assert len(set(forms.values())) > 1
    manifest = json.loads((tmp_path / "artifact" / "manifest.json").read_text())
    assert manifest["quant"] == "5.5bpw"
    units = json.loads((tmp_path / "work" / "bits" / "losses.json").read_text())["units"]
    bits = sum(unit["weights"] * FORMATS[_form(unit["parameters"], forms)].bits for unit in units)
    assert 5.0 < bits / sum(unit["weights"] for unit in units) <= 5.5 + 1e-6


def _form(parameters: list[str], forms: dict[str, str]) -> str:
    """Return the format of a unit: of the tensor of its name, or of its layer's bundle."""
    layer = parameters[0].rsplit(".", 2)[0]
    return next(form for name, form in forms.items() if name in parameters or name.startswith(layer))


@pytest.mark.slow("rounds and compiles a model")
def test_another_budget_measures_nothing_again(
    tiny_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"calibration": (text,), "work": tmp_path / "work", "rounding": "nearest"}
    _compile(tiny_model, tmp_path / "a", quant="auto", **options)
    monkeypatch.setattr("picompile.rounding.calibration.measure_losses", lambda *_: pytest.fail("measures again"))
    _compile(tiny_model, tmp_path / "b", quant="8.5bpw", **options)
    forms = json.loads((tmp_path / "b" / "report.json").read_text())["weight_formats"]
    # The table of embeddings is looked up, and has no share in the bits that a token reads.
    assert {form for name, form in forms.items() if "embed" not in name} == {"q8"}


@pytest.mark.slow("rounds and compiles a model")
def test_standard_input_is_read_once_for_all_steps(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    words = ("--context", "32", "--rounding-tokens", "1024", "--accuracy-bound", "off", "--checkpoint-bound", "report")
    for quant in ("q4", "5bpw"):
        ended = cli(
            "compile", tiny_model, "-o", tmp_path / quant, "--quant", quant, "--calibration", "-", *words, stdin=_TEXT
        )
        assert ended.code == 0, ended.err
        assert "the end of standard input" in ended.out
        assert "rounded for 1,024 tokens of calibration text at most" in ended.out
        assert ("bits a weight, estimated to lose " in ended.out) == (quant == "5bpw")
        shown = cli("inspect", tmp_path / quant, "--json")
        assert json.loads(shown.out)["rounding"].keys() >= {"method", "tokens"}
        assert set(json.loads(shown.out)["weight_formats"].values()) >= {"q4"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--quant", "3bpw"), "from 4.5 to 8.5 bits"),
        (
            ("--quant", "q9"),
            "unknown quantization 'q9'; known are 4bit, f16, q8, q6, q4m, q4, mxfp4, stored, auto",
        ),
        (("--quant", "q4_k"), "q4_k is a format of quantized checkpoints alone, which keep it with --quant stored"),
        (("--predictor-quant", "q5"), "unknown quantization 'q5' of predictors"),
        (("--quant", "q8", "--rounding", "calibrated"), "formats of fewer than 8 bits, not q8"),
        (("--rounding", "calibrated", "--calibration", "nowhere.txt"), "nowhere.txt: no such file"),
        (("--rounding", "other"), "other"),
        (("--rounding", "calibrated", "--rounding-tokens", "1023"), "--rounding-tokens"),
        (("--rounding-tokens", "2048"), "each weight is rounded to the nearest; leave them out"),
        (("--skip-tokens", "4096"), "but not how much skipping may cost"),
        (("--rounding", "nearest", "--calibration", "x"), "rounding to the nearest reads none"),
    ],
)
def test_wrong_options_are_one_line(
    cli: Cli, tiny_model: Path, tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    ended = cli("compile", tiny_model, "-o", tmp_path / "artifact", *words)
    assert ended.code == 2
    assert said in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_module_in_memory_reads_no_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a model folder"):
        compile_model(capture_module(Llama()), tmp_path / "artifact", CompileOptions(quant="5bpw", context=32))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_said_before_anything_is_read(
    cli: Cli, tiny_model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("picompile.rounding.calibration.round_model", lambda *_: pytest.fail("begins"))
    monkeypatch.setattr("picompile.rounding.calibration.FORMATS", {"q6": Codec("q6", 1 << 50)})
    ended = cli("compile", tiny_model, "-o", tmp_path / "artifact", "--calibration", text, "--rounding-tokens", "1024")
    assert ended.code == 5
    assert "take fewer --rounding-tokens" in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow("rounds and compiles a model")
def test_a_budget_with_a_pass_behind_quantization(tiny_model: Path, text: Path, tmp_path: Path) -> None:
    behind = {"passes": ("quantize@quantized",), "rounding": "nearest"}
    report = _compile(tiny_model, tmp_path / "a", quant="5bpw", calibration=(text,), **behind)
    assert len(set(report["weight_formats"].values())) > 1  # type: ignore[attr-defined]
