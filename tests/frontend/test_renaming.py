"""Names of tensors as transformers renames them, and tensors that the model computes by itself."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    XmodConfig,
    XmodForCausalLM,
)

from picompile import UnsupportedModelError
from picompile.frontend.checkpoint import SINGLE_FILE
from picompile.frontend.hf import load_model, open_checkpoint
from picompile.frontend.left_out import LeftOut
from picompile.frontend.renaming import IgnoredTensors
from picompile.frontend.tensor_file import TensorHeader

Tensors = dict[str, Tensor]
_SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30, "max_position_embeddings": 64}


@pytest.fixture
def gpt_neox(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = GPTNeoXConfig(**_SIZES, hidden_size=16, intermediate_size=20)
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path / "neox")
    return tmp_path / "neox"


@pytest.fixture
def gpt2(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_head=2, n_layer=1, vocab_size=30, n_positions=64)).save_pretrained(tmp_path)
    return tmp_path


def _tensors(folder: Path) -> Tensors:
    return {name: tensor.clone() for name, tensor in load_file(folder / SINGLE_FILE).items()}


def test_the_head_of_gpt_neox(gpt_neox: Path) -> None:
    """Published checkpoints call it `embed_out`, and transformers `lm_head`."""
    tensors = _tensors(gpt_neox)
    head = next(name for name in ("lm_head.weight", "embed_out.weight") if name in tensors)
    for name in ("lm_head.weight", "embed_out.weight"):
        save_file({name if key == head else key: value for key, value in tensors.items()}, gpt_neox / SINGLE_FILE)
        weights = open_checkpoint(gpt_neox).weights
        assert torch.equal(weights.load("lm_head.weight"), tensors[head])
    both = {"embed_out.weight": tensors[head], "lm_head.weight": tensors[head].clone()}
    save_file(tensors | both, gpt_neox / SINGLE_FILE)
    with pytest.raises(UnsupportedModelError, match=r"embed_out\.weight and lm_head\.weight are both the model's lm_h"):
        open_checkpoint(gpt_neox)
    save_file(tensors | {"gpt_neox.extra": torch.ones(3)}, gpt_neox / SINGLE_FILE)
    with pytest.raises(UnsupportedModelError, match=r"holds gpt_neox\.extra"):
        open_checkpoint(gpt_neox)


def test_names_with_the_base_models_prefix_and_without(gpt2: Path) -> None:
    bare = {name.removeprefix("transformer."): tensor for name, tensor in _tensors(gpt2).items()}
    # Masks are left out, as transformers does.
    masks = {"h.0.attn.bias": torch.ones(1, 1, 64, 64).tril(), "h.0.attn.masked_bias": torch.zeros(())}
    for prefix in ("transformer.", ""):
        save_file({f"{prefix}{name}": tensor for name, tensor in (bare | masks).items()}, gpt2 / SINGLE_FILE)
        weights = open_checkpoint(gpt2).weights
        assert torch.equal(weights.load("transformer.h.0.mlp.c_fc.weight"), bare["h.0.mlp.c_fc.weight"])
        assert not any(name.endswith((".attn.bias", ".masked_bias")) for name in weights.names())


@pytest.mark.parametrize("change", [0.0, 0.5])
def test_buffers_that_the_model_computes(change: float, tmp_path: Path) -> None:
    """A checkpoint may store what its config.json makes, but nothing else in its place."""
    config = GPTJConfig(n_embd=16, n_layer=1, n_head=2, rotary_dim=4, vocab_size=30, n_positions=64)
    model = GPTJForCausalLM(config)
    model.save_pretrained(tmp_path)
    name, computed = next(iter(model.named_buffers()))
    save_file(_tensors(tmp_path) | {name: computed.clone() + change}, tmp_path / SINGLE_FILE)
    if not change:
        assert name not in set(open_checkpoint(tmp_path).weights.names())
        return
    with pytest.raises(UnsupportedModelError, match=r"embed_positions has other values than config\.json makes it"):
        open_checkpoint(tmp_path)


def test_a_buffer_that_no_config_makes(tmp_path: Path) -> None:
    """Its values are those of memory that nothing was written to."""
    save_file({"table": torch.ones(3)}, tmp_path / "a.safetensors")
    model = torch.nn.Module()
    model.register_buffer("table", torch.empty(3, device="meta"))
    left_out = LeftOut(tmp_path, ["table"], None)
    ignored = IgnoredTensors({"table": TensorHeader(tmp_path / "a.safetensors", "F32", (3,), "table")}, model, left_out)
    with pytest.raises(UnsupportedModelError, match="table is a buffer of values that no config"):
        ignored("table")


def test_where_transformers_own_code_ends_with_an_error(tmp_path: Path) -> None:
    """X-MOD wants to be told a language."""
    config = XmodConfig(**_SIZES, hidden_size=16, intermediate_size=20, is_decoder=True)
    XmodForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=r"captured: ValueError: Input language .* \(modeling_xmod\.py:\d+\)$"
    ):
        load_model(tmp_path)


def test_code_of_a_checkpoint_is_never_run(gpt_neox: Path, tmp_path: Path) -> None:
    """A class of transformers is its own in spite of auto_map; another class is refused by its name."""
    trace = tmp_path / "ran"
    (gpt_neox / "modeling_new.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    path = gpt_neox / "config.json"
    code = {"AutoModelForCausalLM": "modeling_new.NewForCausalLM", "AutoConfig": "modeling_new.NewConfig"}
    raw = json.loads(path.read_text()) | {"auto_map": code}
    path.write_text(json.dumps(raw))
    assert type(open_checkpoint(gpt_neox).model) is GPTNeoXForCausalLM
    path.write_text(json.dumps(raw | {"architectures": ["NewForCausalLM"], "model_type": "new"}))
    with pytest.raises(UnsupportedModelError, match=r"NewForCausalLM is code in the checkpoint \(auto_map\)") as caught:
        load_model(gpt_neox)
    assert "\n" not in str(caught.value)
    assert not trace.exists()
