"""Products in bfloat16: what they are of, where they are asked for, and that PyTorch's setting is put back."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.layers import random_layer
from helpers.support import BuildOnce, save_tiny_llama
from picompile import products
from picompile.errors import UsageError
from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.run import profile_model
from picompile.predictors.profile.text import CalibrationText
from picompile.predictors.train.candidates import split
from picompile.predictors.train.data import measure_firing
from picompile.predictors.train.fit import InitialPredictor, JobSettings, ReducedRankStart, fit
from picompile.products import fast_products, products_in_bf16, require_bf16
from picompile_runtime.devices.machine import cpu_features, missing_features

TEXT = CalibrationText("words", " ".join(random.choices(["neuron", "gate", "fires", "and", "the"], k=1000)))

has_bf16 = pytest.mark.skipif(bool(missing_features(["avx512_bf16"])), reason="the processor has no bfloat16")


@has_bf16
def test_factors_are_rounded_and_sums_are_not() -> None:
    x, w, bias = torch.randn(2, 65, 515), torch.randn(257, 515), torch.randn(257)
    expected = x.bfloat16().double() @ w.bfloat16().double().T
    with torch.no_grad(), products_in_bf16(True):
        found, biased = torch.nn.functional.linear(x, w), torch.nn.functional.linear(x, w, bias)
        in_double = x.double() @ w.double().T
        scores = torch.bmm(x, w.expand(2, -1, -1).mT)
    assert found.dtype == biased.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(biased, found + bias)
    assert (found - in_double).abs().max() > 0.02
    torch.testing.assert_close(scores.double(), in_double, rtol=1e-4, atol=1e-3)


def test_fast_products_are_of_float32() -> None:
    x, w, bias = torch.randn(3, 129, 515), torch.randn(257, 515), torch.randn(257)
    expected = x.double() @ w.double().T + bias
    with fast_products():
        torch.testing.assert_close(torch.nn.functional.linear(x, w, bias).double(), expected, rtol=1e-4, atol=2e-3)
    with products_in_bf16(True):
        alone = x @ w.T
        with fast_products():
            assert torch.equal(x @ w.T, alone)


def test_a_product_that_rounds_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products._allowed_bf16_is_float32() or "amx_bf16" in cpu_features()
    with products_in_bf16(True):
        assert not products._allowed_bf16_is_float32()
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: False)
    before = torch.backends.mkldnn.matmul.fp32_precision
    with fast_products():
        assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_the_setting_is_put_back_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_onednn_is_faster", lambda: True)
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(ValueError, match="halfway"), fast_products():
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        raise ValueError("halfway")
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    first, second = fast_products(), fast_products()
    # Two threads can do so: the one that began first ends first.
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    second.__exit__(None, None, None)
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_a_processor_without_them_is_told_first(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "missing_features", list)
    with pytest.raises(UsageError, match=r"--bf16: .* leave the option out"):
        require_bf16()
    with pytest.raises(UsageError, match="--bf16"):
        profile_model(tiny_model, tmp_path / "profile", ProfileOptions((TEXT,), window=64, bf16=True))
    assert not any(tmp_path.iterdir())


@has_bf16
@pytest.mark.slow("profiles a model twice; single products are fast")
def test_a_profile_counts_nearly_the_same(build_once: BuildOnce, tmp_path: Path) -> None:
    model = build_once("wide-llama", lambda folder: save_tiny_llama(folder, hidden_size=64, intermediate_size=256))
    options: dict[str, Any] = {"tokens": 2048, "window": 128, "accuracy_bound": None}
    counts = {}
    for bf16 in (False, True):
        profile = profile_model(model, tmp_path / str(bf16), ProfileOptions((TEXT,), bf16=bf16, **options))
        counts[bf16] = torch.stack([profile.counts(layer.layer).double() for layer in profile.layers])
    assert not torch.equal(counts[False], counts[True])
    assert (counts[False] - counts[True]).abs().sum() < 0.01 * counts[False].sum()
    with pytest.raises(UsageError, match="other inputs"):
        profile_model(model, tmp_path / "True", ProfileOptions((TEXT,), **options))


@has_bf16
def test_a_fit_in_bf16_finds_as_much() -> None:
    data = random_layer(7, samples=2500, hidden=96, neurons=384)
    train, test = split(len(data.samples))
    contribution = measure_firing(data, test).contribution
    start = ReducedRankStart(data, contribution, "block", train).of_rank(24)
    start = InitialPredictor(start.fc1, start.fc2 + torch.randn_like(start.fc2) * start.fc2.std(), start.bias)
    how = JobSettings("learned", "block", None, "contribution", 4, 0.97, 0, "cpu", 0.4)
    fitted = [fit(data, contribution, "block", start, replace(how, bf16=bf16), train) for bf16 in (False, True)]
    rounded, exact = fitted[1].scores(data.inputs("block", test)), fitted[0].scores(data.inputs("block", test))
    assert not torch.equal(rounded, exact)
    agree = ((rounded > 0) == (exact > 0)).double().mean()
    assert agree > 0.99
