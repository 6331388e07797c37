"""Layers that are captured once a kind: the stamped graph is the captured one, and layers that differ are noticed."""

import copy
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

from helpers.families import VARIANTS
from helpers.greedy import config_json
from helpers.same_graph import description
from picompile.frontend.build import build_model, call_model
from picompile.frontend.config import make_config
from picompile.frontend.export import export_decoder
from picompile.frontend.families import find_family
from picompile.frontend.hf import raw_activation
from picompile.frontend.layer_kinds import PassedLayers, UnequalLayersError, find_layers
from picompile.testing import random_weights
from picompile_passes.base import Stage
from picompile_passes.errors import UnsupportedGraphError, VerifyError
from picompile_passes.graph.materialize import materialize
from picompile_passes.graph.nodes import calls
from picompile_passes.graph.operands import FFN
from picompile_passes.graph.stamps import Stamps, set_stamps, stamps_of
from picompile_passes.passes.canonicalize import canonicalize, raised_form
from picompile_passes.passes.canonicalize.stamp_layers import check_stamps
from picompile_passes.passes.insert_predictors import InsertPredictors
from picompile_passes.verify import verify

LAYERS, WIDTH = 7, 4
# What differs in how layers are called and what they hand on.
NAMES = ["llama-relu", "mistral-window", "opt-pre-norm", "falcon-7b", "falcon-40b", "bitnet", "nanochat"]


def decoder(name: str) -> nn.Module:
    variant = VARIANTS[name]
    config_class = getattr(transformers, variant.model_class).config_class
    raw = config_class(**variant.config | {"num_hidden_layers": LAYERS}).to_dict()
    raw |= {"architectures": [variant.model_class]} | dict(variant.rename)
    family = find_family(raw)
    return build_model(family, make_config(family, raw), raw_activation(family, raw))


@pytest.mark.slow("exports a model per family; one is fast", but=("llama-relu",))
@pytest.mark.parametrize("name", NAMES)
def test_the_stamped_graph_is_the_captured_one(name: str) -> None:
    model = decoder(name)
    stamped, whole = (export_decoder(model, call_model, 64, whole=each) for each in (False, True))
    assert stamps_of(stamped) is not None and stamps_of(whole) is None
    assert len(stamped.graph.nodes) < len(whole.graph.nodes) / 2
    canonical = canonicalize(stamped)
    verify(canonical, Stage.CANONICAL)
    assert description(canonical) == description(canonicalize(whole))
    assert stamps_of(canonical) is None
    if name == NAMES[0]:
        weights = random_weights(whole)
        with pytest.raises(UnsupportedGraphError, match=f"the graph has 2 of the model's {LAYERS} layers"):
            materialize(stamped, weights)
        predicted = InsertPredictors("none")(raised_form(stamped)).graph_module
        with pytest.raises(VerifyError, match="all-layers"):
            verify(predicted, Stage.PREDICTED)
        _check_refusals(raised_form(stamped))


@pytest.mark.slow("exports a mixture twice")
def test_dense_layers_before_mixtures() -> None:
    """Of seven layers the first is dense: it is captured, and two with experts."""
    raw = config_json("ernie4_5_moe", {"num_hidden_layers": LAYERS})
    family = find_family(raw)
    model = build_model(family, make_config(family, raw), None)
    stamped, whole = (export_decoder(model, call_model, 64, whole=each) for each in (False, True))
    stamps = stamps_of(stamped)
    assert stamps is not None and stamps.captured == 3 and stamps.sources == (0, 1, *[2] * (LAYERS - 2))
    assert description(canonicalize(stamped)) == description(canonicalize(whole))


def _check_refusals(graph_module: torch.fx.GraphModule) -> None:
    """Check that the graph alone shows stamps that are wrong, and captured layers that differ."""
    right = stamps_of(graph_module)
    assert right is not None
    for stamps, message in (
        (Stamps("model.layers.", (0, 1, *[0] * 5), 2), "no captured layer before layer 0 equals it"),
        (Stamps("model.layers.0.mlp.", (0, 1, *[1] * 5), 2), "layer 0 reads model.layers.0.mlp.gate_proj.weight"),
        (Stamps("model.layers.", (0, 1, 2, *[2] * 4), 3), "it has other layers than the model"),
    ):
        set_stamps(graph_module, stamps)
        with pytest.raises(UnsupportedGraphError, match=message):
            check_stamps(graph_module)
    set_stamps(graph_module, right)
    check_stamps(graph_module)
    *_, block = calls(graph_module.graph, FFN)
    block.update_arg(7, "silu")
    with pytest.raises(UnsupportedGraphError, match="no captured layer before layer 1 equals it"):
        check_stamps(graph_module)


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.factor = 2.0
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Hand the number on, as to a cache."""
        return self._with(self.layer_idx, x) + mask

    def _with(self, number: int, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.factor * self.table


class Numbered(Layer):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * 2.0 if self.layer_idx % 3 == 1 else x


class Decoder(nn.Module):
    def __init__(self, kind: type[Layer] = Layer, special: int = -1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(number) for number in range(LAYERS))
        self.special = special

    def forward(self, x: Tensor) -> Tensor:
        masks = (torch.zeros(1), torch.ones(1))
        for number, layer in enumerate(self.layers):
            x = layer(x, masks[int(number == self.special)])
        return x


class Scaled(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(1)
        for number, layer in enumerate(self.layers):
            x = layer(x, mask)
            x = x * 2.0 if number == self.special else x
        return x


class Gathering(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        mask, found = torch.zeros(1), list[Tensor]()
        for layer in self.layers:
            x = layer(x, mask)
            found.append(x)
        return x + found[self.special]


class Skipping(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        mask, found = torch.zeros(1), [x]
        for number, layer in enumerate(self.layers):
            found.append(layer(found[-2 if number == self.special else -1], mask))
        return found[-1]


class Early(Decoder):
    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(1)
        for layer in self.layers[: self.special]:
            x = layer(x, mask)
        return x


def passed(module: nn.Module) -> None:
    found = find_layers(module)
    assert found is not None and (found.name, found.captured) == ("layers", 2)
    PassedLayers(list(module.layers), found).check(lambda: module(torch.ones(1, WIDTH)))  # type: ignore[arg-type]


def test_passed_layers_give_what_they_are_given() -> None:
    module = Decoder()
    passed(module)
    x, mask = torch.ones(1, WIDTH), torch.zeros(1)
    torch.testing.assert_close(module(x), module.layers[1](module.layers[0](x, mask), mask))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda: Decoder(Numbered), "computes with the number of its layer"),
        (lambda: Decoder(special=4), "layer 4 is called with other values than layer 1"),
        (lambda: Scaled(special=3), "in between two layers|other values"),
        (lambda: Gathering(special=4), "in between two layers"),
        (lambda: Skipping(special=5), "layer 5 is called with other values"),
        (lambda: Early(special=5), "5 of 7 layers are called"),
    ],
)
def test_a_model_that_treats_layers_differently(module: Callable[[], nn.Module], message: str) -> None:
    with torch.no_grad(), pytest.raises(UnequalLayersError, match=message):
        passed(module())


def _hooked(layer: nn.Module) -> None:
    layer.register_forward_hook(lambda *given: None)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "factor", 3.0),
        lambda layer: setattr(layer, "layer_idx", 0),
        lambda layer: setattr(layer, "linear", nn.Linear(WIDTH, WIDTH, bias=False)),
        lambda layer: layer.table.mul_(2.0),
        _hooked,
    ],
)
def test_a_layer_that_differs_is_of_its_own_kind(change: Callable[[nn.Module], object]) -> None:
    module = Decoder()
    assert find_layers(module) is not None
    change(module.layers[5])
    # All layers up to this one would have to be captured, and it is not stamped: there is nothing to gain.
    assert find_layers(module) is None


def test_layers_that_share_parameters_are_captured() -> None:
    module = Decoder()
    module.layers[5].linear = module.layers[2].linear
    assert find_layers(module) is None


def test_kinds_that_alternate() -> None:
    module = Decoder()
    more = nn.ModuleList(copy.deepcopy(module.layers[0]) for _ in range(3 * LAYERS))
    for number, layer in enumerate(more):
        layer.layer_idx, layer.factor = number, 1.0 + number % 3 // 2  # type: ignore[assignment]
    module.layers = more
    found = find_layers(module)
    assert found is not None and found.captured == 6
    assert found.sources[:9] == (0, 1, 2, 3, 4, 5, 1, 1, 5)
    assert found.stamps == Stamps("layers.", found.sources, 6)
