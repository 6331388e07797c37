"""Checkpoints as they are found: sharded, in three dtypes, under old names; and every way in which they can be bad."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.families import build, save
from picompile import PicompileError, UnsupportedModelError, UsageError
from picompile.frontend import hf
from picompile.frontend.checkpoint import INDEX_FILE, SINGLE_FILE, TensorHeader, _equal_tensors
from picompile.frontend.hf import open_checkpoint

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, torch.dtype, str], Path]:
    known: dict[tuple[str, torch.dtype, str], Path] = {}

    def get(name: str, dtype: torch.dtype, shard: str) -> Path:
        key = (name, dtype, shard)
        if key not in known:
            known[key] = tmp_path_factory.mktemp("original")
            save(name, build(name), known[key], dtype, max_shard_size=shard)
        return known[key]

    return get


@pytest.fixture
def checkpoint(originals: Callable[[str, torch.dtype, str], Path], tmp_path: Path) -> Checkpoints:
    """A copy to spoil: of a Llama in float16 in one file, unless said otherwise."""

    def copy(name: str = "llama-relu", dtype: torch.dtype = torch.float16, shard: str = "1GB") -> Path:
        return Path(shutil.copytree(originals(name, dtype, shard), tmp_path / "model"))

    return copy


def _rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / SINGLE_FILE).items()}
    save_file(change(tensors), folder / SINGLE_FILE)


def _configure(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shard", ["1GB", "100KB"])
def test_every_weight_comes_out_as_it_was_saved(dtype: torch.dtype, shard: str, checkpoint: Checkpoints) -> None:
    folder = checkpoint(dtype=dtype, shard=shard)
    files = list(folder.glob("*.safetensors"))
    assert (len(files) > 3) == (shard == "100KB")
    weights = open_checkpoint(folder).weights
    expected = {name: tensor.to(dtype) for name, tensor in build("llama-relu").named_parameters()}
    assert set(weights.names()) == expected.keys()
    for name, tensor in expected.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert torch.equal(weights.load(name), tensor)
    assert weights.dtype == {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    with pytest.raises(KeyError):
        weights.load("lm_head.bias")


def test_one_shard_is_open_at_a_time(checkpoint: Checkpoints) -> None:
    folder = checkpoint(shard="100KB")
    weights = open_checkpoint(folder).weights
    file_of = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    mapped = []
    for name in file_of:
        tensor = weights.load(name)
        del tensor
        maps = Path("/proc/self/maps").read_text()
        mapped.append({file for file in file_of.values() if str(folder / file) in maps})
        assert mapped[-1] == {file_of[name]}
    weights.close()
    assert not any(file in Path("/proc/self/maps").read_text() for file in map(str, folder.glob("*.safetensors")))
    assert torch.equal(weights.load("model.norm.weight"), build("llama-relu").model.norm.weight.half())


@pytest.mark.parametrize(
    ("name", "prefix"), [("llama-relu", "model."), ("opt-pre-norm", "model."), ("falcon-7b", "transformer.")]
)
def test_names_of_a_base_model(name: str, prefix: str, checkpoint: Checkpoints) -> None:
    folder = checkpoint(name)
    expected = open_checkpoint(folder).weights
    _rewrite(folder, lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    weights = open_checkpoint(folder).weights
    assert set(weights.names()) == set(expected.names())


def test_a_tied_embedding_under_its_other_name(checkpoint: Checkpoints) -> None:
    folder = checkpoint("qwen2")
    embedding = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"].clone()
    _rewrite(folder, lambda t: {n.replace("model.embed_tokens", "lm_head"): tensor for n, tensor in t.items()})
    weights = open_checkpoint(folder).weights
    assert torch.equal(weights.load("model.embed_tokens.weight"), embedding)


@pytest.mark.parametrize("equal", [False, True])
def test_a_head_that_is_stored_besides_the_embedding_it_is_tied_to(equal: bool, checkpoint: Checkpoints) -> None:
    folder = checkpoint("qwen2")
    head = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"].clone()
    head[-1, -1] += 0.0 if equal else 1.0
    _rewrite(folder, lambda tensors: tensors | {"lm_head.weight": head})
    opened = open_checkpoint(folder)
    # transformers goes by the values, too.
    assert ("lm_head.weight" in set(opened.weights.names())) != equal
    reference = AutoModelForCausalLM.from_pretrained(folder)
    assert (reference.lm_head.weight is reference.model.embed_tokens.weight) == equal
    assert opened.facts.parameters == sum(parameter.numel() for parameter in reference.parameters())


def test_one_parameter_under_two_names(checkpoint: Checkpoints) -> None:
    folder = checkpoint()
    name = "model.layers.0.mlp.up_proj.weight"
    _rewrite(folder, lambda tensors: tensors | {name.removeprefix("model."): tensors[name] * 0.5})
    with pytest.raises(UnsupportedModelError, match="two tensors for one parameter"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("factor", "says"), [(1e-7, "has few digits below"), (1e6, "which ends at 65504"), (0.0, None), (1e-2, None)]
)
def test_matrices_that_float16_does_not_hold(factor: float, says: str | None, checkpoint: Checkpoints) -> None:
    folder, name = checkpoint(dtype=torch.float32), "model.layers.0.mlp.up_proj.weight"
    _rewrite(folder, lambda tensors: tensors | {name: tensors[name].clamp(-1, 1) * factor})
    weights = open_checkpoint(folder).weights
    if says is None:
        weights.load(name)
        return
    with pytest.raises(UnsupportedModelError, match=says):
        weights.load(name)


def test_buffers_and_predictors_of_others_are_left_alone(checkpoint: Checkpoints) -> None:
    folder = checkpoint()
    extra = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.mlp.predictor.fc1.weight")
    _rewrite(folder, lambda tensors: tensors | {name: torch.zeros(3) for name in extra})
    assert not set(open_checkpoint(folder).weights.names()) & set(extra)


def _remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _pickle(folder: Path) -> None:
    (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin")


def _remove_weights(folder: Path) -> None:
    (folder / SINGLE_FILE).unlink()


def _truncate(folder: Path) -> None:
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data[: len(data) // 2])


def _empty(folder: Path) -> None:
    (folder / SINGLE_FILE).write_bytes(b"")


def _garble_header(folder: Path) -> None:
    data = bytearray((folder / SINGLE_FILE).read_bytes())
    data[8:40] = bytes(32)
    (folder / SINGLE_FILE).write_bytes(data)


def _remove_tensor(folder: Path) -> None:
    _rewrite(folder, lambda t: {name: tensor for name, tensor in t.items() if "layers.1.mlp.up" not in name})


def _add_tensor(folder: Path) -> None:
    _rewrite(folder, lambda t: t | {"model.layers.0.self_attn.q_norm.weight": torch.ones(24)})


def _cut_tensor(folder: Path) -> None:
    _rewrite(folder, lambda t: t | {"model.norm.weight": t["model.norm.weight"][:95].clone()})


def _as_float8(folder: Path) -> None:
    _rewrite(folder, lambda t: {name: tensor.to(torch.float8_e4m3fn) for name, tensor in t.items()})


def _as_int8(folder: Path) -> None:
    _rewrite(folder, lambda t: {name: tensor.to(torch.int8) for name, tensor in t.items()})


def _break_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": [')


def _list_json(folder: Path) -> None:
    (folder / "config.json").write_text("[1, 2]")


def _config(**fields: object) -> Callable[[Path], None]:
    return lambda folder: _configure(folder, **fields)


_UNSUPPORTED = [
    (_pickle, r"pickled \(\.bin\).*convert to safetensors"),
    (_remove_weights, "neither model.safetensors nor model.safetensors.index.json"),
    (_truncate, "model.safetensors: truncated or damaged"),
    (_empty, "model.safetensors: truncated or damaged"),
    (_garble_header, "model.safetensors: truncated or damaged"),
    (_remove_tensor, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
    (_add_tensor, r"holds model\.layers\.0\.self_attn\.q_norm\.weight"),
    (_cut_tensor, r"model\.norm\.weight is \[95\], but .*config\.json makes it \[96\]"),
    (_as_float8, "is F8_E4M3; only F32, F16, BF16 are read"),
    (_as_int8, "is I8; only F32, F16, BF16 are read"),
    (_break_json, "config.json: not readable as JSON"),
    (_list_json, "config.json: not a JSON object"),
    (_config(quantization_config={"quant_method": "gptq", "bits": 3}), r"quantized \(gptq with 3 bits\)"),
    (_config(quantization_config={"quant_method": "awq"}), r"quantized \(awq with None bits\)"),
    (_config(architectures=["MixtralForCausalLM"], model_type="mixtral"), r"no tensor .*mlp\.gate\.weight"),
    (_config(architectures=["BertModel"], model_type="bert"), "kind BertModel with the model_type bert are not"),
    (_config(architectures=["SwinModel"], model_type=...), "kind SwinModel are not supported"),
    (_config(architectures=..., model_type="swin"), "kind swin are not supported"),
    (
        _config(architectures=["LlamaForCausalLM"], model_type="qwen2"),
        "LlamaForCausalLM and the model_type qwen2 are diff",
    ),
    (_config(architectures=["GemmaForCausalLM"], model_type="phi"), "GemmaForCausalLM with the model_type phi are not"),
    (_config(architectures=..., model_type=...), "kind unnamed are not supported"),
    (_config(hidden_act="mish"), "activation 'mish' is not supported"),
    (_config(hidden_act="fatrelu"), "its threshold, hidden_act_param, is missing"),
    (_config(hidden_size="many"), "config.json: .*hidden_size"),
    (_config(num_attention_heads=5), "config.json: .*"),
    (_config(vocab_size=504), r"embed_tokens\.weight is \[503, 96\]"),
    (_config(attention_bias=True), r"no tensor .*proj\.bias"),
]


@pytest.mark.parametrize(("spoil", "message"), _UNSUPPORTED, ids=[message for _, message in _UNSUPPORTED])
def test_bad_checkpoints_end_in_one_line(spoil: Callable[[Path], None], message: str, checkpoint: Checkpoints) -> None:
    folder = checkpoint()
    spoil(folder)
    _expect(folder, UnsupportedModelError, message)


def test_no_folder_and_no_model_in_it(checkpoint: Checkpoints, tmp_path: Path) -> None:
    _expect(tmp_path / "nowhere", UsageError, "nowhere: no such folder")
    folder = checkpoint()
    _remove_config(folder)
    _expect(folder, UsageError, "no config.json")


def _remove_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def _index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX_FILE).read_text())
        (folder / INDEX_FILE).write_text(json.dumps(change(index["weight_map"])))

    return spoil


def _swap(weights: dict[str, str]) -> dict:
    return {"weight_map": weights | {"model.norm.weight": weights["model.embed_tokens.weight"]}}


_BAD_INDICES = [
    (_remove_shard, "index.json: names model-00002-of-.*, which is not there"),
    (_index(_swap), r"says that model\.norm\.weight is in model-.*, but it is not"),
    (_index(lambda weights: {}), "not an index of safetensors files"),
    (_index(lambda weights: {"weight_map": []}), "not an index of safetensors files"),
    (_index(lambda weights: {"weight_map": {"x": 3}}), "not an index of safetensors files"),
    (_index(lambda weights: {"weight_map": {}}), "names no tensors"),
    (_index(lambda weights: {"weight_map": {"x": ".."}}), "names files outside its folder"),
    (_index(lambda weights: {"weight_map": {"x": "y" * 5000}}), "names files outside its folder"),
    (_index(lambda weights: {"weight_map": {"x": "/etc/passwd"}}), "names files outside its folder"),
    (_index(lambda weights: {"weight_map": {"x": "../x.safetensors"}}), "names files outside its folder"),
]


@pytest.mark.parametrize(("spoil", "message"), _BAD_INDICES, ids=[message for _, message in _BAD_INDICES])
def test_bad_indices_end_in_one_line(spoil: Callable[[Path], None], message: str, checkpoint: Checkpoints) -> None:
    folder = checkpoint(shard="100KB")
    spoil(folder)
    _expect(folder, UnsupportedModelError, message)


def test_one_file_and_an_index_of_others(checkpoint: Checkpoints) -> None:
    """transformers reads the one file then, and the index was read here: two models in one folder."""
    folder = checkpoint(shard="100KB")
    shutil.copyfile(sorted(folder.glob("*.safetensors"))[0], folder / SINGLE_FILE)
    _expect(folder, UnsupportedModelError, "names other files: two models")


def test_an_index_of_the_one_file(checkpoint: Checkpoints) -> None:
    folder = checkpoint()
    names = load_file(folder / SINGLE_FILE)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE_FILE)}))
    assert set(open_checkpoint(folder).weights.names()) == set(names)


@pytest.mark.parametrize("layers", [3, 1000, 9_999])
def test_more_layers_than_there_are_tensors_of(
    layers: int, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is built: a million layers took a minute and gigabytes."""
    folder = checkpoint()
    _configure(folder, num_hidden_layers=layers)
    monkeypatch.setattr(hf, "build_model", None)
    _expect(folder, UnsupportedModelError, f"no tensor of layer 2, but config.json asks for {layers} layers")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.weight", float("nan"), r"model\.norm\.weight has NaN or infinite values"),
        ("model.layers.1.input_layernorm.weight", float("inf"), "has NaN or infinite values"),
        ("model.layers.0.mlp.up_proj.weight", float("-inf"), "has NaN or infinite values"),
        ("lm_head.weight", float("nan"), "has NaN or infinite values"),
        ("lm_head.weight", -1e6, r"has values up to 1e\+06, and weights are kept in float16"),
        ("model.norm.weight", 1e6, None),
    ],
)
def test_values_that_no_model_has(name: str, value: float, message: str | None, checkpoint: Checkpoints) -> None:
    folder = checkpoint(dtype=torch.float32)

    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors[name].view(-1)[-1] = value
        return tensors

    _rewrite(folder, spoil)
    weights = open_checkpoint(folder).weights
    if message is None:
        assert weights.load(name).max() == value
        return
    with pytest.raises(UnsupportedModelError, match=message):
        weights.load(name)


def test_a_file_that_changes_after_its_header_was_read(checkpoint: Checkpoints) -> None:
    folder = checkpoint()
    weights = open_checkpoint(folder).weights
    _truncate(folder)
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors: cannot read lm_head\.weight"):
        weights.load("lm_head.weight")


def _expect(folder: Path, kind: type[PicompileError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_matrix_of_integers_equals_no_tensor_that_is_stored(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 3)}, tmp_path / "a.safetensors")
    headers = {
        name: TensorHeader(tmp_path / "a.safetensors", "F32", (2, 3), stored)
        for name, stored in (("a", "a"), ("again", "a"), ("b", "b"))
    }
    assert _equal_tensors(headers, "a", "again") and not _equal_tensors(headers, "a", "b")
