"""Losses of matrices that are rounded alone, and formats for a budget of bits, against all choices that there are."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from picompile.choices import BUDGET_FORMATS, check_quant, is_budget, nearest_format, parse_bits
from picompile.errors import UsageError
from picompile.progress import NoProgress
from picompile.rounding.budget import MatrixUnit, fit_budget, fit_loss, mean_bits
from picompile.rounding.losses import measure_losses, read_losses, write_losses
from picompile.testing import RandomWeights, random_weights
from picompile_passes.formats.packing import dequantize_rows, quantize_rows
from picompile_passes.graph.materialize import materialize
from picompile_passes.passes.insert_predictors import InsertPredictors

_LOSSES = st.floats(1e-9, 0.1)


@st.composite
def _units(draw: st.DrawFn) -> list[MatrixUnit]:
    """A few units; more bits lose less, but not always, since losses are measured."""
    count = draw(st.integers(1, 4))
    return [
        MatrixUnit(f"u{i}", (f"p{i}",), draw(st.integers(32, 10**6)), {form: draw(_LOSSES) for form in BUDGET_FORMATS})
        for i in range(count)
    ]


def _all_choices(units: list[MatrixUnit]) -> list[dict[str, str]]:
    names = [unit.name for unit in units]
    return [dict(zip(names, forms, strict=True)) for forms in itertools.product(BUDGET_FORMATS, repeat=len(units))]


def _loss(units: list[MatrixUnit], forms: dict[str, str]) -> float:
    return sum(unit.losses[forms[unit.name]] for unit in units)


@given(units=_units(), bits=st.floats(4.5, 8.5))
def test_a_budget_is_spent_where_it_saves_most(units, bits):
    found = fit_budget(units, bits)
    assert mean_bits(units, found) <= bits * (1 + 1e-6)
    allowed = [forms for forms in _all_choices(units) if mean_bits(units, forms) <= bits * (1 - 1e-6)]
    if allowed:
        assert _loss(units, found) <= min(_loss(units, forms) for forms in allowed) * (1 + 1e-5) + 1e-9


@given(units=_units(), bound=st.floats(1e-6, 0.2))
def test_a_bound_on_the_loss_takes_the_fewest_bits(units, bound):
    found, least = fit_loss(units, bound), sum(min(unit.losses.values()) for unit in units)
    if least >= bound:
        assert _loss(units, found) == pytest.approx(least)
        return
    assert _loss(units, found) <= bound * (1 + 1e-5)
    allowed = [forms for forms in _all_choices(units) if _loss(units, forms) <= bound * (1 - 1e-5)]
    if allowed:
        assert mean_bits(units, found) <= min(mean_bits(units, forms) for forms in allowed) * (1 + 1e-5)


def test_two_hundred_units_are_chosen_in_a_moment_and_always_alike():
    draw = torch.Generator().manual_seed(0)
    units = []
    for i in range(225):
        losses = {form: float(torch.rand(1, generator=draw)) / 4**k for k, form in enumerate(BUDGET_FORMATS)}
        units.append(MatrixUnit(f"u{i}", (f"p{i}",), 4096 * 4096, losses))
    found = fit_budget(units, 5.1)
    assert 5.05 < mean_bits(units, found) <= 5.1 * (1 + 1e-6)
    assert fit_budget(units, 5.1) == found


def test_texts_of_budgets():
    assert parse_bits("5.2bpw") == 5.2
    assert parse_bits("6bpw") == 6.0
    assert parse_bits("q4") is None
    texts = ("auto", "4.5bpw", "q4", "4.5", "bpw", "-5bpw", "5.2 bpw")
    assert [text for text in texts if is_budget(text)] == ["auto", "4.5bpw"]
    for text in ("4.49bpw", "8.6bpw", "0bpw", "99bpw"):
        with pytest.raises(UsageError, match=r"from 4.5 to 8.5 bits"):
            parse_bits(text)


_WINDOWS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8]]


def _rounded(weight, form, *, transposed):
    """The weight as a format has it, whose rows are those of the transpose where kernels read these."""
    matrix = weight.T if transposed else weight
    near = dequantize_rows(quantize_rows(matrix, form), form, matrix.shape[1])
    return (near.T if transposed else near).contiguous()


def _logits(graph, weights):
    module = materialize(graph, weights)
    with torch.no_grad():
        return [module(torch.tensor(ids), torch.arange(len(ids))).double() for ids in _WINDOWS]


@pytest.mark.slow("runs a model per matrix; one family is fast", but=("llama-relu",))
@pytest.mark.parametrize("name", ["llama-relu", "opt-pre-norm", "falcon-7b"])
def test_the_loss_of_each_unit(name, transformed):
    graph = transformed(name, InsertPredictors())
    weights = random_weights(graph, seed=5)
    units = measure_losses(graph, weights, _WINDOWS, NoProgress())
    exact = _logits(graph, weights)
    named = {parameter for unit in units for parameter in unit.parameters}
    matrices = {each for each in weights.names() if weights.load(each).dim() == 2}
    assert matrices - named <= {each for each in matrices if "embed" in each}
    for unit in units:
        changed = {each: weights.load(each) for each in weights.names()}
        for parameter in unit.parameters:
            # Down is kept with a row for each neuron.
            down = parameter.split(".")[-2] in ("down_proj", "fc2", "dense_4h_to_h")
            changed[parameter] = _rounded(weights.load(parameter), "q4", transposed=down)
        other = _logits(graph, RandomWeights(changed))
        tokens = sum(map(len, _WINDOWS))
        expected = sum(
            float((a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum())
            for a, b in zip(exact, other, strict=True)
        )
        assert unit.losses["q4"] == pytest.approx(expected / tokens, rel=2e-2, abs=1e-9), unit.name
        assert unit.losses["q4"] > unit.losses["q4m"] > unit.losses["q6"] > unit.losses["q8"] >= 0
        assert unit.weights == sum(weights.load(each).numel() for each in unit.parameters)


def test_losses_are_read_for_the_same_inputs_alone(transformed, tmp_path):
    graph = transformed("llama-relu", InsertPredictors())
    units = measure_losses(graph, random_weights(graph, seed=1), _WINDOWS, NoProgress())
    write_losses(tmp_path / "losses.json", "these", units)
    assert read_losses(tmp_path / "losses.json", "these") == units
    assert read_losses(tmp_path / "losses.json", "others") is None
    assert read_losses(tmp_path / "nothing.json", "these") is None
    (tmp_path / "losses.json").write_text("{")
    assert read_losses(tmp_path / "losses.json", "these") is None


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        *(("Q4_K_M", "4bit"), ("q4_k_s", "4bit"), ("Q4_1", "4bit"), ("Q4_0", "q4"), ("IQ4_XS", "q4"), ("Q3_K_L", "q4")),
        *(("IQ2_S", "q4"), ("Q5_K_M", "q6"), ("Q6_K", "q6"), ("Q8_0", "q8"), ("MXFP4", "mxfp4"), ("F16", "f16")),
    ],
)
def test_formats_of_gguf_files_are_refused_with_the_nearest(name: str, nearest: str) -> None:
    assert nearest_format(name) == nearest
    with pytest.raises(UsageError, match=f"; {nearest} is nearest to {name}$"):
        check_quant(name)


def test_other_names_have_no_nearest_format() -> None:
    for name in ("q9", "K_M", "", "4bit"):
        assert nearest_format(name) is None
    with pytest.raises(UsageError, match=r"and budgets like 5\.2bpw$"):
        check_quant("q9")
