"""Synthesized checkpoints: the firing asked for is the firing measured, in eager transformers."""

import errno
import functools
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from helpers.products import sampled
from picompile.errors import DoesNotFitError, UnsupportedModelError, UsageError
from picompile.frontend.bamboo import BambooConfig, BambooForCausalLM, FatReLU
from picompile.synth.firing import firing_offsets
from picompile.synth.rates import beta_rates, share_of_firings
from picompile.synth.shapes import SHAPES, find_config, find_shape, shape_from_config, tensor_shapes
from picompile.synth.synthesis import Synthesis, synthesize
from picompile.synth.writer import CheckpointWriter

TINY = ("tiny-reglu", "tiny-opt", "tiny-drelu", "tiny-falcon")
RATES = (0.03, 0.1, 0.5)
TEXT = "The quick brown fox jumps over 12 lazy dogs. What did they see? Nothing (it was 7 o'clock) -- they slept.\n"

Make = Callable[..., Path]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are faster on one thread, and the cores may be shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    @functools.cache
    def make_once(name: str, active: float, dtype: str = "f16") -> Path:
        folder = tmp_path_factory.mktemp("synth") / name
        synthesize(SHAPES[name], active, 1, folder, dtype)
        return folder

    return make_once


def load(folder: Path) -> Any:
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    cls = BambooForCausalLM if architecture == "BambooForCausalLM" else AutoModelForCausalLM
    model, info = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


class Watch:
    """Records, for each layer, the inputs of the FFN and which neurons fired."""

    FIRST = ("mlp", "fc1")
    LAST = ("down_proj", "fc2", "dense_4h_to_h")

    def __init__(self, model: Any) -> None:
        self.inputs: list[torch.Tensor] = []
        self.fired: list[torch.Tensor] = []
        for name, module in model.named_modules():
            if name.endswith(self.FIRST):
                module.register_forward_pre_hook(lambda _, args: self.inputs.append(args[0].flatten(0, -2)))
            elif name.endswith(self.LAST):
                module.register_forward_pre_hook(lambda _, args: self.fired.append(args[0].flatten(0, -2) != 0))

    def rate(self) -> float:
        rate = torch.cat([fired.flatten() for fired in self.fired]).float().mean().item()
        self.fired.clear()
        self.inputs.clear()
        return rate


def random_ids(model: Any, sequences: int = 6, length: int = 100) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (sequences, length), generator=torch.Generator().manual_seed(77))


@torch.inference_mode()
@sampled(name=TINY, active=RATES, slow="synthesizes a model each; each model and each rate is fast")
def test_measured_rate_is_the_one_asked_for(make: Make, name: str, active: float) -> None:
    folder = make(name, active)
    model = load(folder)
    watch = Watch(model)
    model(random_ids(model))
    assert watch.rate() == pytest.approx(active, rel=0.1)
    text = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt").input_ids
    model(text)
    model.generate(text[:, :20], max_new_tokens=100, min_new_tokens=100, do_sample=False)
    assert watch.rate() == pytest.approx(active, rel=0.1)


@torch.inference_mode()
@pytest.mark.parametrize("active", (0.01, 1.0))
def test_extreme_rates(make: Make, active: float) -> None:
    model = load(make("tiny-drelu", active))
    watch = Watch(model)
    model(random_ids(model, sequences=12))
    assert watch.rate() == pytest.approx(active, rel=0.1)


@torch.inference_mode()
@pytest.mark.parametrize("name", TINY)
def test_predictors_know_the_few_neurons_that_make_most_firings(make: Make, name: str) -> None:
    folder = make(name, 0.1)
    model = load(folder)
    watch = Watch(model)
    model(random_ids(model))
    predictors = load_file(folder / "predictors.safetensors")
    fired, predicted = [], []
    for layer, (x, mask) in enumerate(zip(watch.inputs, watch.fired, strict=True)):
        # Neurons that all fired alike would need 80 % of themselves for 80 % of the firings.
        assert share_of_firings(mask.double().mean(0).numpy()) < 0.45
        fc1, fc2, bias = (predictors[f"layers.{layer}.{part}"].float() for part in ("fc1", "fc2", "bias"))
        assert fc1.shape[0] == fc2.shape[1] == 32
        fired.append(mask.flatten())
        predicted.append((x @ fc1.T @ fc2.T + bias > 0).flatten())
    both = (torch.cat(fired) & torch.cat(predicted)).sum()
    assert both / torch.cat(fired).sum() >= 0.999
    assert both / torch.cat(predicted).sum() >= 0.999
    if name == "tiny-reglu":
        # Gating matrices have a low rank.
        weights = load_file(folder / "model.safetensors")
        values = torch.linalg.svdvals(weights["model.layers.1.mlp.gate_proj.weight"].float())
        assert values[32:].max() < 0.002 * values[0] and values[31] > 0.05 * values[0]
    # Generation does not fall into a hole.
    prompt = torch.arange(40, 50).unsqueeze(0)
    generated = model.generate(prompt, max_new_tokens=60, do_sample=False)[0, 10:].tolist()
    assert len(generated) == 60
    assert len(set(generated)) >= 15
    assert 1 < model(prompt).logits.std() < 10


# In billions: what the models have that the shapes are named after. Falcon-40B's 41.8 count its tied head twice.
PUBLISHED = {
    "opt-6.7b": 6.66, "opt-13b": 12.85, "opt-30b": 29.97, "opt-66b": 65.7, "opt-175b": 174.6, "llama-7b": 6.74,
    "llama-13b": 13.02, "llama-70b": 68.98, "falcon-40b": 41.3,
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_tensors_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        if shape.config["model_type"] == "bamboo":
            model: Any = BambooForCausalLM(BambooConfig(**shape.config))
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape.config))
    expected = {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert dict(tensor_shapes(shape)) == expected
    if name in PUBLISHED:
        assert sum(math.prod(extents) for extents in expected.values()) / 1e9 == pytest.approx(
            PUBLISHED[name], rel=1e-3
        )


def test_a_config_is_found_that_synth_does_not_make(tmp_path: Path) -> None:
    config = {**SHAPES["tiny-reglu"].config, "hidden_act": "silu"}
    path = tmp_path / "smooth.json"
    path.write_text(json.dumps(config))
    assert find_config(str(path)) == ("smooth", config | {"architectures": ["LlamaForCausalLM"]})
    assert find_config("tiny-opt") == ("tiny-opt", SHAPES["tiny-opt"].config)
    with pytest.raises(UnsupportedModelError, match="'silu' leaves no neuron silent"):
        find_shape(str(path))


def test_same_seed_same_bytes(make: Make, tmp_path: Path) -> None:
    first = make("tiny-opt", 0.1)
    synthesize(SHAPES["tiny-opt"], 0.1, 1, tmp_path / "again")
    synthesize(SHAPES["tiny-opt"], 0.1, 2, tmp_path / "other")
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in (tmp_path / "again").iterdir())
    for file in files:
        assert (first / file).read_bytes() == (tmp_path / "again" / file).read_bytes(), file
    assert (first / "model.safetensors").read_bytes() != (tmp_path / "other" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("dtype", "least"), (("bf16", 0.995), ("f32", 0.9999)))
def test_dtypes(make: Make, dtype: str, least: float) -> None:
    folder = make("tiny-reglu", 0.1, dtype=dtype)
    expected = {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    assert load_file(folder / "model.safetensors")["lm_head.weight"].dtype == expected
    report = json.loads((folder / "synth.json").read_text())
    assert report["measured_active"] == pytest.approx(0.1, rel=0.1)
    assert min(layer["recall"] for layer in report["layers"]) >= least
    load(folder)


def test_tokenizer_takes_any_text(make: Make) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make("tiny-reglu", 0.1))
    text = "naïve 🙂\tx = {1}\n\0"
    ids = tokenizer(text).input_ids
    assert ids[0] == 1 and max(ids) < 512
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    words = [tokenizer.decode([token]) for token in range(258, 512)]
    assert len(set(words)) == len(words) and all(word.strip() for word in words)


_COMMON = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 300}
LLAMA = {
    "model_type": "llama", "hidden_act": "relu", "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": [1, 299], **_COMMON,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    "tied": LLAMA | {"tie_word_embeddings": True, "bos_token_id": None},
    "qwen2": LLAMA | {"model_type": "qwen2", "rope_theta": 1e6},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 32},
    "fatrelu": LLAMA | {"hidden_act": "fatrelu", "hidden_act_param": 0.02},
    "falcon-new": {
        "model_type": "falcon", "activation": "relu", "ffn_hidden_size": 160, "num_attention_heads": 8,
        "num_kv_heads": 2, "new_decoder_architecture": True, "bos_token_id": 5, "eos_token_id": 5, **_COMMON,
    },
}  # fmt: skip


@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_config_file_is_a_shape(variant: str, tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text(json.dumps(VARIANTS[variant]))
    result = synthesize(find_shape(str(tmp_path / "shape.json")), 0.2, 0, tmp_path / "model")
    assert result.measured_active == pytest.approx(0.2, rel=0.1)
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    threshold = config.get("hidden_act_param")
    if threshold is not None:
        path.write_text(json.dumps(config | {"hidden_act": "relu"}))
    model = load(tmp_path / "model")
    for layer in model.model.layers if threshold is not None else ():
        layer.mlp.act_fn = FatReLU(threshold)
    watch = Watch(model)
    model(random_ids(model))
    assert watch.rate() == pytest.approx(0.2, rel=0.1)


def test_shards_make_one_checkpoint(tmp_path: Path) -> None:
    table = [("a", (3, 4)), ("b", (10,)), ("c", (5, 2)), ("d", (1,))]
    tensors = {name: torch.arange(math.prod(shape)).float().reshape(shape) for name, shape in table}
    with CheckpointWriter(tmp_path, "model", table, "f32", shard_bytes=60) as writer:
        for name in ("d", "c", "b"):
            writer.put(name, tensors[name].clone())
        for row in tensors["a"]:
            writer.put("a", row.clone().unsqueeze(0))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * 33
    files = {"a": 1, "b": 2, "c": 3, "d": 3}
    assert index["weight_map"] == {name: f"model-0000{n}-of-00003.safetensors" for name, n in files.items()}
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)


def test_a_checkpoint_with_a_hole_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"1 tensors were not written, among them b"),
        CheckpointWriter(tmp_path, "model", [("a", (2,)), ("b", (2, 3))], "f16") as writer,
    ):
        writer.put("a", torch.ones(2))
        writer.put("b", torch.ones(1, 3))


@pytest.mark.parametrize("active", (0.001, 0.03, 0.5, 0.7, 1.0))
def test_rates_are_a_beta_distribution(active: float) -> None:
    rates = torch.from_numpy(beta_rates(active, 1000))
    assert rates.mean().item() == pytest.approx(active, rel=1e-6)
    assert (rates.diff() >= 0).all() and rates[0] >= 0 and rates[-1] <= 1
    a = 0.5 if active <= 0.5 else 0.5 * active / max(1 - active, 1e-12)
    variance = active * (1 - active) / (a / active + 1)
    assert rates.var().item() == pytest.approx(variance, rel=0.02, abs=1e-9)


def test_skew_says_how_few_neurons_make_most_firings() -> None:
    hot = [share_of_firings(beta_rates(0.07, 1000, skew)) for skew in (0.1, 0.3, 0.5, 1.0, 5.0)]
    assert hot == sorted(hot)
    assert hot[2] == share_of_firings(beta_rates(0.07, 1000))
    assert hot[0] < 0.15 and hot[-1] > 0.6


def test_offsets_give_the_rates() -> None:
    levels = torch.randn(2000, 500, generator=torch.Generator().manual_seed(3)) * 2 + 1
    rates = torch.linspace(0.002, 0.998, 500, dtype=torch.float64)
    offsets = firing_offsets(levels[:1000], rates)
    measured = (offsets > levels[1000:]).double().mean(0)
    assert (measured - rates).abs().max() < 0.06
    assert measured.mean().item() == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"active": active}, "share of active neurons") for active in (0.0, 1.01, math.nan)),
        ({"dtype": "q4"}, "unknown dtype 'q4'"),
        ({"rank": 1}, "rank must be"),
        ({"rank": 49}, "rank must be from 2 to 48"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        synthesize(SHAPES["tiny-reglu"], **{"active": 0.1, "seed": 0, "output": tmp_path / "model", **options})
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError, match="unknown shape 'gpt-5'"):
        find_shape("gpt-5")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model_type": "gpt2"}, UnsupportedModelError, "does not make model_type 'gpt2'"),
        ({"hidden_act": "silu"}, UnsupportedModelError, "'silu' leaves no neuron silent"),
        ({"num_attention_heads": 7}, UnsupportedModelError, "cannot be divided among 7 heads"),
        ({"num_key_value_heads": 3}, UnsupportedModelError, "4 heads cannot share 3 key heads"),
        ({"vocab_size": 258}, UnsupportedModelError, "cannot hold 256 bytes"),
        ({"hidden_size": 16}, UnsupportedModelError, "too small"),
        ({"num_hidden_layers": 0}, UsageError, "num_hidden_layers must be a whole number"),
        ({"hidden_size": "many"}, UsageError, "hidden_size must be a whole number"),
        ({"rms_norm_eps": "tiny"}, UsageError, "rms_norm_eps must be a number above 0"),
        ({"eos_token_id": "</s>"}, UsageError, "eos_token_id must be a token id"),
    ],
)
def test_configs_that_are_not_made(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        shape_from_config("x", LLAMA | change)


def synthesize_tiny(output: Path) -> Synthesis:
    return synthesize(SHAPES["tiny-reglu"], 0.1, 0, output)


def test_outputs_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    for output, message in (
        (tmp_path / "model", "exists"),
        (tmp_path / "missing" / "model", "is no folder"),
        (Path("/proc/model"), None),
    ):
        with pytest.raises(UsageError, match=message):
            synthesize_tiny(output)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "notes.txt"]


def test_disk_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=10_000_000))
    with pytest.raises(DoesNotFitError, match=r"needs 16\.6 MiB, and the disk of .* has 9\.5 MiB free"):
        synthesize_tiny(tmp_path / "model")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("fault", "error"),
    (
        (OSError(errno.ENOSPC, "No space left on device"), DoesNotFitError),
        (OSError(errno.EIO, "Input/output error"), UsageError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ),
)
def test_nothing_is_left_behind(
    fault: BaseException, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise fault

    monkeypatch.setattr("picompile.synth.network.finish", fail)
    with pytest.raises(error):
        synthesize_tiny(tmp_path / "model")
    assert not list(tmp_path.iterdir())
