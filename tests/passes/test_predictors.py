"""The prediction of each predictor kind for a neuron, and the registration of kinds."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.installed import install
from picompile_passes import plugins
from picompile_passes.dialect import dequantize_rows, quantize_rows
from picompile_passes.errors import PassOptionError, RegistryError
from picompile_passes.formats import FORMATS
from picompile_passes.graph.operands import PREDICT
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.predictors import PREDICTOR_KINDS, PredictorKind, predictor_kind, sign_limit

PLUGIN = """
from picompile.passes import PredictorKind

def evaluate(x, weights, threshold):
    return x @ weights[0].T > threshold

def neurons(weights):
    return weights[0].shape[0]

KIND = PredictorKind("plugged", evaluate, neurons, row_local=True, parameters={"probe": "FD"}, threshold=0.25)
OTHER = PredictorKind("plugged", evaluate, neurons, row_local=True)
something = 3
"""


def values(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    sizes=st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 4), st.integers(1, 9)),
    threshold=st.sampled_from([0.0, -0.7, 0.3]),
    relu=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_a_learned_predictor_is_its_formula(sizes, threshold, relu, seed):
    tokens, inputs, rank, neurons = sizes
    shapes = [(tokens, inputs), (rank, inputs), (neurons, rank), (neurons,)]
    x, fc1, fc2, bias = (values(*shape, seed=seed + i) for i, shape in enumerate(shapes))
    middle = x.double().numpy() @ fc1.double().numpy().T
    logits = (np.maximum(middle, 0) if relu else middle) @ fc2.double().numpy().T + bias.double().numpy()
    mask = PREDICT(x, [fc1, fc2, bias], "learned-relu" if relu else "learned", threshold)
    assert (mask.shape, mask.dtype) == ((tokens, neurons), torch.bool)
    assert (((logits > threshold) == mask.numpy()) | (abs(logits - threshold) < 1e-4)).all()


SPECIAL = [0.0, -0.0, 1e-45, -1e-45, float("inf"), float("-inf"), 3.0, -3.0]


@given(data=st.data(), columns=st.integers(1, 9), threshold=st.floats(-0.5, 1.0))
def test_sign_counts_the_columns_that_agree(data, columns, threshold):
    row = st.lists(st.sampled_from(SPECIAL), min_size=columns, max_size=columns)
    x, w = data.draw(row), data.draw(row)
    agree = sum((a < 0) == (b < 0) for a, b in zip(x, w, strict=True))
    mask = PREDICT(torch.tensor([x]), [torch.tensor([w])], "sign", threshold)
    assert mask.tolist() == [[agree > threshold * columns]]


def test_a_share_of_just_the_threshold_is_silent():
    """Seven of ten columns are not more than 0.7 of them, though float32 knows no 0.7."""
    x = torch.ones(1, 10)
    rows = torch.ones(11, 10).tril(-1)
    mask = PREDICT(x, [torch.where(rows == 1, 1.0, -1.0)], "sign", 0.7)
    assert mask[0].tolist() == [False] * 8 + [True] * 3
    assert [sign_limit(10, threshold) for threshold in (0.7, 0.5, 0.55, -1.0, 1.0)] == [7, 5, 5, -10, 10]


@pytest.mark.parametrize("form", [*FORMATS])
def test_signs_of_a_packed_matrix_are_those_of_what_it_holds(form):
    """A small weight becomes 0, or -0 where the scale is negative, and counts as positive."""
    w = values(7, 64, seed=0) * torch.tensor([1.0, 1e-9]).repeat(32)
    held = dequantize_rows(quantize_rows(w, form), form, 64)
    x = values(3, 64, seed=1)
    assert torch.equal(PREDICT(x, [held], "sign", 0.5), PREDICT(x, [held + 0.0], "sign", 0.5))


@pytest.mark.parametrize("kind", ["learned", "learned-relu", "sign", "exact", "none"])
def test_a_fake_value_has_the_shape_of_the_real_one(kind):
    weights = [values(3, 5, seed=0), values(7, 3, seed=1), values(7, seed=2)]
    weights = weights if kind.startswith("learned") else [values(7, 5, seed=0)]
    real = PREDICT(values(2, 5, seed=4), weights, kind, 0.0)
    fake = PREDICT(torch.empty(2, 5, device="meta"), [weight.to("meta") for weight in weights], kind, 0.0)
    assert (fake.shape, fake.dtype) == (real.shape, real.dtype) == ((2, 7), torch.bool)


def test_a_name_that_is_taken_cannot_be_added():
    exact = predictor_kind("exact")
    PREDICTOR_KINDS.add(exact)
    with pytest.raises(ValueError, match="there is a predictor kind 'exact' already"):
        PREDICTOR_KINDS.add(PredictorKind("exact", exact.evaluate, exact.neurons, row_local=True))
    assert predictor_kind("exact") is exact
    with pytest.raises(ValueError, match=r"unknown predictor kind 'magic'; known are exact, none, learned, .*sign"):
        predictor_kind("magic")


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """`plugin("name = predicting:KIND")` installs a package that offers predictor kinds; it is forgotten in the end."""
    monkeypatch.setattr(PREDICTOR_KINDS, "_known", dict(PREDICTOR_KINDS._known))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    yield lambda *points: install(tmp_path / "site", "predicting", PLUGIN, "picompile.predictors", points)
    sys.modules.pop("predicting", None)


def test_an_installed_package_offers_a_kind_which_is_imported_when_it_is_named(plugin):
    plugin("plugged = predicting:KIND")
    assert "plugged" in [*PREDICTOR_KINDS]
    InsertPredictors("exact", kinds={0: "plugged"})
    with pytest.raises(PassOptionError, match=r"layer 3: 'plug' is not one of auto, exact, none, .*plugged"):
        InsertPredictors(kinds={3: "plug"})
    assert "predicting" not in sys.modules
    kind = predictor_kind("plugged")
    assert kind is predictor_kind("plugged")
    assert [*PREDICTOR_KINDS].count("plugged") == 1
    mask = PREDICT(torch.ones(1, 2), [torch.tensor([[0.2, 0.2], [0.1, 0.1]])], "plugged", 0.3)
    assert mask.tolist() == [[True, False]]


@pytest.mark.slow("starts a process that runs all stages")
def test_a_kind_of_a_package_goes_through_all_stages(plugin):
    """In a process of its own, which no test has told of the kind: verified, split, packed, and computed."""
    folder = plugin("plugged = predicting:KIND")
    code = f"""if True:
        import sys
        sys.path.insert(0, {folder!r})
        from picompile.passes import Pipeline, verifying, calls, arguments
        from picompile.testing import build, OPT, random_weights, run
        from picompile_passes.graph.operands import PREDICT
        from picompile_passes.registry import make_pass
        passes = map(make_pass, ("insert-predictors{{kind=plugged}}", "partition{{hot=(0:(1,2))}}", "quantize"))
        after = Pipeline(tuple(passes), hook=verifying)(build(OPT)).graph_module
        weights = random_weights(after)
        assert "predictors.layers.1.probe" in weights.tensors
        assert run(after, weights).isfinite().all()
        print([arguments(mask)["threshold"] for mask in calls(after.graph, PREDICT)])
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0.25, 0.25, 0.25]\n"


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ("gone = predicting:Gone", "predictor kind gone from predicting does not import: .*Gone"),
        ("gone = no_such_module_here:Gone", "predictor kind gone from predicting does not import: No module named"),
        ("something = predicting:something", "predicting:something from predicting is not a Predictor"),
        ("smaller = predicting:KIND", "is registered as smaller but calls itself plugged"),
    ],
)
def test_a_registration_that_is_no_predictor_kind_is_refused(plugin, point, message):
    plugin(point)
    with pytest.raises(RegistryError, match=message) as error:
        predictor_kind(point.split(" ")[0])
    assert error.value.exit_code == 2


def test_a_name_of_ours_cannot_be_taken(plugin):
    plugin("learned = predicting:KIND")
    text = "^two predictor kinds are called learned: one from picompile and predicting:KIND from predicting$"
    with pytest.raises(RegistryError, match=text):
        InsertPredictors()


def test_a_program_and_a_package_may_name_the_same_kind_but_not_two(plugin):
    plugin("plugged = predicting:KIND")
    import predicting

    PREDICTOR_KINDS.add(predicting.KIND)
    assert [*PREDICTOR_KINDS].count("plugged") == 1
    PREDICTOR_KINDS._known["plugged"] = predicting.OTHER
    with pytest.raises(RegistryError, match="two predictor kinds are called plugged: one that this program added and"):
        list(PREDICTOR_KINDS)


def test_a_name_given_twice_by_packages_is_an_error(monkeypatch):
    points = [EntryPoint("plugged", f"{module}:KIND", "picompile.predictors") for module in ("one", "other")]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    with pytest.raises(RegistryError, match=r"two predictor kinds are called plugged: one:KIND .* and other:KIND from"):
        list(PREDICTOR_KINDS)
