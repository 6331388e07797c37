"""Checkpoints as they are found: sharded, in three dtypes, under old names; and every way in which they can be bad."""

import functools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.families import build, save
from helpers.products import sampled
from picompile import PicompileError, UnsupportedModelError, UsageError
from picompile.frontend import hf
from picompile.frontend.checkpoint import INDEX_FILE, SINGLE_FILE, _equal_tensors
from picompile.frontend.hf import open_checkpoint
from picompile.frontend.tensor_file import TensorHeader

Checkpoints = Callable[..., Path]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    @functools.cache
    def get(name: str, dtype: torch.dtype, shard: str) -> Path:
        folder = tmp_path_factory.mktemp("original")
        save(name, build(name), folder, dtype, max_shard_size=shard)
        return folder

    return get


@pytest.fixture
def checkpoint(originals: Checkpoints, tmp_path: Path) -> Checkpoints:
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


@sampled(
    dtype=["f32", "f16", "bf16"], shard=["1GB", "100KB"], slow="has each dtype and each kind of file; pairs are alike"
)
def test_every_weight_comes_out_as_it_was_saved(dtype: str, shard: str, checkpoint: Checkpoints) -> None:
    kind = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]
    folder = checkpoint(dtype=kind, shard=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 3) == (shard == "100KB")
    weights = open_checkpoint(folder).weights
    expected = {name: tensor.to(kind) for name, tensor in build("llama-relu").named_parameters()}
    assert set(weights.names()) == expected.keys()
    for name, tensor in expected.items():
        assert weights.shape(name) == tuple(tensor.shape)
        assert torch.equal(weights.load(name), tensor)
    assert weights.dtype == dtype
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


@pytest.mark.parametrize("name", ["llama-relu", "opt-pre-norm", "falcon-7b"])
def test_names_of_a_base_model(name: str, checkpoint: Checkpoints) -> None:
    folder = checkpoint(name)
    expected = set(open_checkpoint(folder).weights.names())
    prefix = "transformer." if name == "falcon-7b" else "model."
    _rewrite(folder, lambda tensors: {name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    assert set(open_checkpoint(folder).weights.names()) == expected


def test_a_tied_embedding_under_its_other_name(checkpoint: Checkpoints) -> None:
    folder = checkpoint("qwen2")
    embedding = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"].clone()
    _rewrite(folder, lambda t: {n.replace("model.embed_tokens", "lm_head"): tensor for n, tensor in t.items()})
    assert torch.equal(open_checkpoint(folder).weights.load("model.embed_tokens.weight"), embedding)


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


def test_buffers_and_predictors_of_others_are_left_alone(checkpoint: Checkpoints) -> None:
    folder = checkpoint()
    extra = ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.mlp.predictor.fc1.weight")
    _rewrite(folder, lambda tensors: tensors | {name: torch.zeros(3) for name in extra})
    opened = open_checkpoint(folder)
    assert not set(opened.weights.names()) & set(extra)
    (line,) = opened.warnings
    assert "its authors' code skips neurons (model.layers.1.mlp.predictor.fc1.weight)" in line


def _truncate(folder: Path) -> None:
    data = (folder / SINGLE_FILE).read_bytes()
    (folder / SINGLE_FILE).write_bytes(data[: len(data) // 2])


def _garble_header(folder: Path) -> None:
    data = bytearray((folder / SINGLE_FILE).read_bytes())
    data[8:40] = bytes(32)
    (folder / SINGLE_FILE).write_bytes(data)


def _as(dtype: torch.dtype) -> Callable[[Path], None]:
    return lambda folder: _rewrite(folder, lambda tensors: {name: each.to(dtype) for name, each in tensors.items()})


def _without(part: str) -> Callable[[Path], None]:
    return lambda folder: _rewrite(folder, lambda tensors: {n: each for n, each in tensors.items() if part not in n})


def _with(name: str, change: Callable[[dict[str, Tensor]], Tensor]) -> Callable[[Path], None]:
    return lambda folder: _rewrite(folder, lambda tensors: tensors | {name: change(tensors)})


def _config(**fields: object) -> Callable[[Path], None]:
    return lambda folder: _configure(folder, **fields)


_NORM, _UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
_UNSUPPORTED = [
    (
        lambda folder: (folder / SINGLE_FILE).rename(folder / "pytorch_model.bin"),
        r"pickled \(\.bin\).*convert to safetensors",
    ),
    (lambda folder: (folder / SINGLE_FILE).unlink(), "neither model.safetensors nor model.safetensors.index.json"),
    (_truncate, "model.safetensors: truncated or damaged"),
    (lambda folder: (folder / SINGLE_FILE).write_bytes(b""), "model.safetensors: truncated or damaged"),
    (_garble_header, "model.safetensors: truncated or damaged"),
    (_without("layers.1.mlp.up"), r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"),
    (_with("model.layers.0.self_attn.q_norm.weight", lambda tensors: torch.ones(24)), r"holds .*\.q_norm\.weight"),
    (_with(_UP.removeprefix("model."), lambda tensors: tensors[_UP] * 0.5), "two tensors for one parameter"),
    (
        _with(_NORM, lambda tensors: tensors[_NORM][:95].clone()),
        r"model\.norm\.weight is \[95\], but .*config\.json makes it \[96\]",
    ),
    (_as(torch.float8_e4m3fn), "is F8_E4M3; only F32, F16, BF16 are read"),
    (_as(torch.int8), "is I8; only F32, F16, BF16 are read"),
    (lambda folder: (folder / "config.json").write_text('{"architectures": ['), "config.json: not readable as JSON"),
    (_config(quantization_config={"quant_method": "awq"}), r"quantized \(awq with None bits\)"),
    (_config(architectures=["MixtralForCausalLM"], model_type="mixtral"), r"no tensor .*mlp\.gate\.weight"),
    (_config(architectures=["BertModel"], model_type="bert"), "kind BertModel with the model_type bert are not"),
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
    (folder / "config.json").unlink()
    _expect(folder, UsageError, "no config.json")


def _index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        index = json.loads((folder / INDEX_FILE).read_text())
        (folder / INDEX_FILE).write_text(json.dumps(change(index["weight_map"])))

    return spoil


def _swap(weights: dict[str, str]) -> dict:
    return {"weight_map": weights | {"model.norm.weight": weights["model.embed_tokens.weight"]}}


_NO_INDICES = ({}, {"weight_map": []}, {"weight_map": {"x": 3}})
_BAD_INDICES = [
    (lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(), "names model-00002-of-.*, which is not there"),
    (_index(_swap), r"says that model\.norm\.weight is in model-.*, but it is not"),
    *((_index(lambda _, wrong=wrong: wrong), "not an index of safetensors files") for wrong in _NO_INDICES),
    (_index(lambda _: {"weight_map": {}}), "names no tensors"),
    *(
        (_index(lambda _, name=name: {"weight_map": {"x": name}}), "names files outside its folder")
        for name in ("..", "y" * 5000, "/etc/passwd", "../x.safetensors")
    ),
    # transformers reads the one file then, and the index was read here: two models in one folder.
    (
        lambda folder: shutil.copyfile(sorted(folder.glob("*.safetensors"))[0], folder / SINGLE_FILE),
        "names other files: two models",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), _BAD_INDICES)
def test_bad_indices_end_in_one_line(spoil: Callable[[Path], None], message: str, checkpoint: Checkpoints) -> None:
    folder = checkpoint(shard="100KB")
    spoil(folder)
    _expect(folder, UnsupportedModelError, message)


def test_an_index_of_the_one_file(checkpoint: Checkpoints) -> None:
    folder = checkpoint()
    names = load_file(folder / SINGLE_FILE)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(names, SINGLE_FILE)}))
    assert set(open_checkpoint(folder).weights.names()) == set(names)


def test_tensors_that_an_index_leaves_out_are_read(checkpoint: Checkpoints) -> None:
    """transformers reads them too: a model without the head that it has would be another, with a tied one."""
    folder = checkpoint(shard="100KB")
    index = json.loads((folder / INDEX_FILE).read_text())
    last = index["weight_map"].pop("model.norm.weight")
    (folder / INDEX_FILE).write_text(json.dumps(index))
    assert "model.norm.weight" in open_checkpoint(folder).weights.names()
    other = next(file for file in index["weight_map"].values() if file != last)
    twice = load_file(folder / other) | {"model.norm.weight": torch.ones(64)}
    save_file(twice, folder / other)
    _expect(folder, UnsupportedModelError, "model.norm.weight is in model-.* and in model-")


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
    ("name", "change", "message"),
    [
        (_NORM, lambda norm: norm * math.nan, r"model\.norm\.weight has NaN or infinite values"),
        ("model.layers.1.input_layernorm.weight", lambda norm: norm / 0, "has NaN or infinite values"),
        (_UP, lambda up: up.where(up < up.max(), -math.inf), "has NaN or infinite values"),
        ("lm_head.weight", lambda head: head.where(head < head.max(), math.nan), "has NaN or infinite values"),
        (
            "lm_head.weight",
            lambda head: head.where(head < head.max(), -1e6),
            r"has values up to 1e\+06, and weights are",
        ),
        (_UP, lambda up: up.clamp(-1, 1) * 1e-7, "has few digits below"),
        (_UP, lambda up: up.clamp(-1, 1) * 1e6, "which ends at 65504"),
        (_UP, lambda up: up * 0.0, None),
        (_UP, lambda up: up.clamp(-1, 1) * 1e-2, None),
        (_NORM, lambda norm: norm * 1e6, None),
    ],
)
def test_values_that_no_model_has(
    name: str, change: Callable[[Tensor], Tensor], message: str | None, checkpoint: Checkpoints
) -> None:
    folder = checkpoint(dtype=torch.float32)
    _rewrite(folder, lambda tensors: tensors | {name: change(tensors[name])})
    weights = open_checkpoint(folder).weights
    if message is None:
        assert torch.equal(weights.load(name), load_file(folder / SINGLE_FILE)[name])
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


def test_a_quantized_matrix_equals_no_tensor_that_is_stored(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(2, 3)}, file)
    headers = {name: TensorHeader(file, "F32", (2, 3), "a", quantized=name == "b") for name in ("a", "again", "b")}
    assert _equal_tensors(headers, "a", "again") and not _equal_tensors(headers, "a", "b")
