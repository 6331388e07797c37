"""Checkpoints with a tensor for each expert, and with the stacks of transformers: the parameters are the same."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, MixtralConfig, MixtralForCausalLM

from picompile import UnsupportedModelError
from picompile.frontend.checkpoint import SINGLE_FILE
from picompile.frontend.hf import open_checkpoint

Tensors = dict[str, Tensor]
_SIZES = {"num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 30, "max_position_embeddings": 64}
_SIZES |= {"hidden_size": 16, "intermediate_size": 20}
_EXPERT = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
_STACK = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.fixture
def model() -> MixtralForCausalLM:
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**_SIZES, num_key_value_heads=1, num_local_experts=3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


@pytest.fixture
def mixtral(model: MixtralForCausalLM, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path)
    return tmp_path


def _tensors(folder: Path) -> Tensors:
    return {name: tensor.clone() for name, tensor in load_file(folder / SINGLE_FILE).items()}


def _check(folder: Path, model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
    weights = open_checkpoint(folder).weights
    parameters = dict(model.named_parameters())
    assert set(weights.names()) == set(parameters)
    for name, parameter in parameters.items():
        assert weights.shape(name) == tuple(parameter.shape)
        loaded = weights.load(name)
        assert loaded.dtype == dtype and torch.equal(loaded, parameter.to(dtype)), name


def test_a_tensor_for_each_expert(mixtral: Path, model: MixtralForCausalLM) -> None:
    assert _EXPERT in _tensors(mixtral)
    _check(mixtral, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_stack_has_the_dtype_of_its_tensors(mixtral: Path, model: MixtralForCausalLM, dtype: torch.dtype) -> None:
    save_file({name: tensor.to(dtype) for name, tensor in _tensors(mixtral).items()}, mixtral / SINGLE_FILE)
    _check(mixtral, model, dtype)


def test_stacks_of_several_dtypes_are_exact(mixtral: Path, model: MixtralForCausalLM) -> None:
    tensors = _tensors(mixtral)
    save_file(tensors | {_EXPERT: tensors[_EXPERT].bfloat16()}, mixtral / SINGLE_FILE)
    expected = model.model.layers[0].mlp.experts.gate_up_proj.detach().clone()
    expected[1, :20] = expected[1, :20].bfloat16().float()
    assert torch.equal(open_checkpoint(mixtral).weights.load(_STACK), expected)


def test_stacks_as_transformers_has_them(mixtral: Path, model: MixtralForCausalLM) -> None:
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, mixtral / SINGLE_FILE)
    _check(mixtral, model)
    # And of the base model, whose names lack a prefix.
    save_file({name.removeprefix("model."): tensor for name, tensor in state.items()}, mixtral / SINGLE_FILE)
    _check(mixtral, model)


def test_experts_of_the_base_model(mixtral: Path, model: MixtralForCausalLM) -> None:
    """Their names lack the prefix, and so does the name of their stack."""
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in _tensors(mixtral).items()}, mixtral / SINGLE_FILE
    )
    _check(mixtral, model)


def _without(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != _EXPERT}


def _renamed(tensors: Tensors) -> Tensors:
    return {name.replace(".experts.1.", ".experts.3."): tensor for name, tensor in tensors.items()}


_WRONG: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "one is missing": (_without, rf"no tensor \.experts\.1\.w1\.weight for {_STACK}, which config\.json asks for$"),
    "one has another number": (_renamed, r"no tensor \.experts\.1\.w1\.weight for model\.layers\.0"),
    "one too many": (
        lambda tensors: tensors | {_EXPERT.replace("1.w1", "3.w1"): tensors[_EXPERT].clone()},
        r"holds .+experts\.3\.w1\.weight, but config\.json makes 3 experts$",
    ),
    "another shape": (
        lambda tensors: tensors | {_EXPERT: tensors[_EXPERT][:19].contiguous()},
        r"experts\.1\.w1\.weight is \[19, 16\], and .+experts\.0\.w1\.weight is \[20, 16\]: experts' matrices must be",
    ),
    "all of another shape": (
        lambda tensors: {n: t[:, :15].contiguous() if ".experts." in n else t for n, t in tensors.items()},
        rf"{_STACK} is \[3, 40, 15\], but .+ makes it \[3, 40, 16\]",
    ),
    "no matrix": (
        lambda tensors: tensors | {_EXPERT: tensors[_EXPERT].flatten()},
        r"experts\.1\.w1\.weight is \[320\]",
    ),
    "both": (
        lambda tensors: tensors | {_STACK: torch.zeros(3, 40, 16)},
        rf"{_STACK} and .+experts\.0\.w1\.weight are both the model's {_STACK}$",
    ),
    "twice": (
        lambda tensors: tensors | {_EXPERT.replace("experts.1", "experts.01"): tensors[_EXPERT].clone()},
        r"holds .+experts\.01\.w1\.weight and .+experts\.1\.w1\.weight: two for one expert$",
    ),
    "a matrix of another name": (
        lambda tensors: tensors | {_EXPERT.replace("w1", "w4"): tensors[_EXPERT].clone()},
        r"holds .+experts\.1\.w4\.weight, which the model that config\.json describes has no place for$",
    ),
    "an integer": (
        lambda tensors: tensors | {_EXPERT: tensors[_EXPERT].to(torch.int32)},
        r"experts\.1\.w1\.weight is I32; only F32, F16, BF16 are read",
    ),
}


@pytest.mark.parametrize("what", _WRONG)
def test_experts_that_make_no_stack(what: str, mixtral: Path) -> None:
    change, message = _WRONG[what]
    save_file(change(_tensors(mixtral)), mixtral / SINGLE_FILE)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        open_checkpoint(mixtral)
    assert "\n" not in str(caught.value)


def test_an_expert_that_is_not_a_number(mixtral: Path) -> None:
    tensors = _tensors(mixtral)
    tensors[_EXPERT][3, 4] = torch.nan
    save_file(tensors, mixtral / SINGLE_FILE)
    weights = open_checkpoint(mixtral).weights
    with pytest.raises(UnsupportedModelError, match=r"experts\.1\.w1\.weight has NaN or infinite values"):
        weights.load(_STACK)


def test_experts_of_a_layer_behind_the_last_are_left_out(tmp_path: Path) -> None:
    """DeepSeek V3's checkpoints have a layer that guesses further tokens, with experts of its own."""
    sizes = {"moe_intermediate_size": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2}
    sizes |= {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
    sizes |= {"qk_nope_head_dim": 4, "v_head_dim": 8, "num_key_value_heads": 2}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**_SIZES, **sizes))
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.randn(4))
    model.save_pretrained(tmp_path)
    tensors = _tensors(tmp_path)
    last = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
    further = {name.replace("layers.1", "layers.2"): tensor.clone() for name, tensor in last.items()}
    save_file(tensors | further | {"model.layers.2.eh_proj.weight": torch.ones(16, 32)}, tmp_path / SINGLE_FILE)
    opened = open_checkpoint(tmp_path)
    (line,) = (line for line in opened.warnings if "left out" in line)
    assert f"guess further tokens (model.layers.2.eh_proj.weight and {len(further)} more)" in line
    # The bias that experts are chosen by is a buffer of the class, and the checkpoint has its values.
    assert torch.equal(opened.weights.load("model.layers.1.mlp.gate.e_score_correction_bias"), bias)


def test_quantized_experts(mixtral: Path, model: MixtralForCausalLM) -> None:
    """FP8 in blocks, as Qwen3's and DeepSeek's: each expert's matrix has scales of its own."""
    tensors, expected = _tensors(mixtral), {}
    for name in [name for name in tensors if ".experts." in name]:
        scale = torch.rand(-(-tensors[name].shape[0] // 8), -(-tensors[name].shape[1] // 8)) + 0.5
        codes = tensors[name].to(torch.float8_e4m3fn)
        factors = scale.repeat_interleave(8, 0).repeat_interleave(8, 1)[: codes.shape[0], : codes.shape[1]]
        expected[name] = codes.float() * factors
        tensors |= {name: codes, f"{name}_scale_inv": scale}
    save_file(tensors, mixtral / SINGLE_FILE)
    config = json.loads((mixtral / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (mixtral / "config.json").write_text(json.dumps(config))
    weights = open_checkpoint(mixtral).weights
    stack = weights.load(_STACK)
    for expert in range(3):
        parts = [expected[_EXPERT.replace("1.w1", f"{expert}.{part}")] for part in ("w1", "w3")]
        torch.testing.assert_close(stack[expert], torch.cat(parts), rtol=1e-6, atol=0)
    assert weights.packed(_STACK, "q8") is None and _STACK in weights.stored()
