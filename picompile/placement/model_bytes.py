"""How a model is packed, and its bytes and launches then, by the part of the model that needs them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from picompile.choices import (
    CHUNK,
    DEFAULT_CONTEXT,
    KV_DTYPES,
    PREDICTORS,
    STORED,
    check_format,
    check_predictor_quant,
    has_spread_cache,
)
from picompile.errors import UsageError
from picompile_codegen.lowering.slices import LEAST, STAGING, STAGING_BYTES


@dataclass(frozen=True)
class Packing:
    """How a model is packed and run. Raises `UsageError` for values that no model can be packed with.

    `quant`, `predictor`, `context`, `kv_dtype` and `chunk` are as in `CompileOptions`, with `auto` for a predictor of
    None. So many `sequences` are decoded together, each with a cache of its own. `tensors` has the formats of single
    matrices, by the names of their parameters, and `predictor_quant` the format of predictors' own. With
    `hot_by_outputs` an accelerator computes every neuron of all blocks, so that down is packed by outputs.
    """

    quant: str = "q4"
    predictor: str = "auto"
    context: int = DEFAULT_CONTEXT
    sequences: int = 1
    kv_dtype: str | None = None
    chunk: int = CHUNK
    tensors: Mapping[str, str] = field(default_factory=dict, hash=False)
    predictor_quant: str = "auto"
    hot_by_outputs: bool = False

    def __post_init__(self) -> None:
        if self.quant != STORED:
            check_format(self.quant)
        check_predictor_quant(self.predictor_quant)
        for value, known, name in (
            (self.predictor, _known_predictors(self.predictor), "predictor"),
            (self.kv_dtype or "f16", tuple(name for name in KV_DTYPES if not has_spread_cache(name)), "KV cache type"),
        ):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}; known are {', '.join(known)}")
        for count, name, least in (
            (self.context, "context", 1),
            (self.sequences, "sequences", 1),
            (self.chunk, "chunk", 2),
        ):
            if count < least:
                raise UsageError(f"the {name} must be at least {least}, not {count}")


def _known_predictors(wanted: str) -> tuple[str, ...]:
    """Return the kinds that can be asked for. Plug-ins are only looked for if `wanted` is none of our kinds."""
    if wanted in ("auto", *PREDICTORS):
        return ("auto", *PREDICTORS)
    from picompile_passes.predictors import PREDICTOR_KINDS

    return ("auto", *PREDICTOR_KINDS)


@dataclass(frozen=True)
class LayerLaunches:
    """Launches for a token of a layer's parts, if they are on the accelerator.

    `attention` counts norms, projections and additions; `kv_cache` attention itself, with rotation and writing the
    cache; `predictor` the kernels that make a mask; `hot` the block's kernel, if any neuron is hot. `receive` counts
    what receives the host's part of the block: where that is the whole block, and where it is not.
    """

    attention: int
    kv_cache: int
    predictor: int
    hot: int
    receive: tuple[int, int] = (0, 0)


# A part of a split layer has at most three vectors of its own, one element a neuron: its neuron numbers and the biases
# of gate and up. Each is padded to 64 bytes.
SPLIT_BYTES = 3 * 64


@dataclass(frozen=True)
class LayerBytes:
    """The bytes and launches of one layer.

    Attributes:
        attention_bytes: projections, their biases and the layer's norms, all read for every token.
        predictor_bytes: a predictor's own weights, all read for every token; 0 for a predictor without any.
        neurons: neurons of the block.
        neuron_bytes: a neuron's rows of gate, up and down, and its elements of biases.
        gating_bytes: the part of `neuron_bytes` that is read whether or not the neuron fires: the gate row with
            `exact`, the bits with `sign`, all of them with `none`, 0 for a predictor with weights of its own.
        shared_bytes: bytes of the block that belong to no neuron: the bias of down, and padding. In a split block they
            are in the hot part.
        kv_cache_bytes: the cache at full context, for all sequences.
        launches: launches on the accelerator.
        number_bytes: a neuron's number. Each part of a split block has the numbers of its neurons if a predictor makes
            one mask for both. So a part of n neurons takes at most n · (`neuron_bytes` + `number_bytes`) +
            `SPLIT_BYTES`, and the hot part `shared_bytes` more.
        predicts_early: whether the predictor reads what the block of the layer before reads, so that its mask can be
            made while that layer waits for the host.
        experts: the experts that the neurons are of, equally many of each; 0 for a block without experts.
        chosen: the experts that a token chooses. No byte of the neurons of others is read for it.
    """

    attention_bytes: int
    predictor_bytes: int
    neurons: int
    neuron_bytes: int
    gating_bytes: int
    shared_bytes: int
    kv_cache_bytes: int
    launches: LayerLaunches
    number_bytes: int = 0
    predicts_early: bool = False
    experts: int = 0
    chosen: int = 0

    @property
    def chosen_share(self) -> float:
        """The share of the block's neurons whose experts a token chooses: all without experts."""
        return self.chosen / self.experts if self.experts else 1.0

    @property
    def hot_launches(self) -> int:
        """The launches that hot neurons need, with those of a predictor without weights of its own, such as `sign`."""
        return self.launches.hot + (0 if self.predictor_bytes else self.launches.predictor)


@dataclass(frozen=True)
class ModelBytes:
    """The bytes and launches of a whole model at one weight format, context and number of sequences.

    A token reads one row of the `embedding_bytes` and all of the `head_bytes`. If they are one matrix (`tied`), it
    counts as the head's, and `embedding_bytes` has only tables of positions. `table_bytes` are small tables that both
    accelerator and host have (rotary angles, the final norm, thresholds of predictors). `workspace_bytes` are
    activations and logits, on each side that computes. `hidden` is in elements: a transfer carries float32 [hidden].
    `head_launches` are those of the head on the accelerator, with the final norm. `chunk` tokens of a prompt are read
    together; predictors' own matrices are in `predictor_quant`.
    """

    name: str
    quant: str
    predictor: str
    context: int
    sequences: int
    hidden: int
    parameters: int
    layers: tuple[LayerBytes, ...]
    embedding_bytes: int
    head_bytes: int
    tied: bool
    table_bytes: int
    workspace_bytes: int
    head_launches: int
    chunk: int = CHUNK
    predictor_quant: str = "auto"

    @property
    def has_experts(self) -> bool:
        """Whether a layer is a mixture of experts."""
        return any(layer.experts for layer in self.layers)

    @property
    def staging_bytes(self) -> int:
        """The most that both staging buffers take of the accelerator's memory, when it reads prompts."""
        slices = (
            min(
                max(layer.neurons * layer.neuron_bytes, layer.attention_bytes),
                max(STAGING_BYTES, LEAST * layer.neuron_bytes),
            )
            for layer in self.layers
        )
        return len(STAGING) * max(slices)

    @property
    def lent_bytes(self) -> int:
        """The most that a copy of a layer's cache takes that the host lends to the accelerator: one sequence's."""
        return max(layer.kv_cache_bytes for layer in self.layers) // self.sequences


def predicting_early(model: ModelBytes, layers: Collection[int]) -> ModelBytes:
    """Return `model` with predictors in these layers that read what the block of the layer before reads.

    A layer whose predictor has no weights of its own, and the first one, stay as they are.
    """
    changed = (
        replace(layer, predicts_early=number in layers and number > 0 and layer.predictor_bytes > 0)
        for number, layer in enumerate(model.layers)
    )
    return replace(model, layers=tuple(changed))


# One kernel sends and one receives: both are in the time of a transfer (`Machine.crossing_s`).
CROSSING_LAUNCHES = 2
