"""How a model is to be packed and run, and its bytes as packed, by what reads them."""

from dataclasses import dataclass

from picompile.choices import CHUNK, DEFAULT_CONTEXT, KV_DTYPES, PREDICTORS, QUANTIZATIONS
from picompile.errors import UsageError

# How a model is to be packed and run: what its bytes are counted for.


@dataclass(frozen=True)
class Packing:
    """How a model is to be packed and run.

    `quant`, `predictor`, `context`, `kv_dtype` and `chunk` as in `CompileOptions`; predictor `auto` is what None is
    there. `batch` sequences are decoded together, each with a cache of its own. Raises `UsageError` for what no model
    can be packed with.
    """

    quant: str = "q4"
    predictor: str = "auto"
    context: int = DEFAULT_CONTEXT
    batch: int = 1
    kv_dtype: str | None = None
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        for value, known, name in (
            (self.quant, QUANTIZATIONS, "quantization"),
            (self.predictor, _known_predictors(self.predictor), "predictor"),
            (self.kv_dtype or "f16", tuple(KV_DTYPES), "KV cache type"),
        ):
            if value not in known:
                raise UsageError(f"unknown {name} {value!r}; known are {', '.join(known)}")
        for count, name, least in ((self.context, "context", 1), (self.batch, "batch", 1), (self.chunk, "chunk", 2)):
            if count < least:
                raise UsageError(f"the {name} must be at least {least}, not {count}")


def _known_predictors(wanted: str) -> tuple[str, ...]:
    """Return the kinds that can be asked for. Plug-ins are only looked for if `wanted` is none of our kinds."""
    if wanted in ("auto", *PREDICTORS):
        return ("auto", *PREDICTORS)
    from picompile_passes.predictors import predictor_kinds

    return ("auto", *predictor_kinds())


# Bytes of a model as packed, by what reads them, and the launches that read them on a GPU.


@dataclass(frozen=True)
class LayerLaunches:
    """Launches of a layer's parts for a token, where they are on the GPU.

    `attention`: norms, projections and additions. `kv_cache`: attention itself, with rotation and writing the cache.
    `predictor`: what makes a mask. `hot`: the block's kernel, where any neuron is hot.
    """

    attention: int
    kv_cache: int
    predictor: int
    hot: int


@dataclass(frozen=True)
class LayerBytes:
    """One layer.

    `attention_bytes`: projections, their biases and the layer's norms, all read for every token. `neurons` rows of
    `neuron_bytes` each (gate, up, down and elements of biases), of which `gating_bytes` are read whether or not the
    neuron fires: the gate row of `exact`, the bits of `sign`, all of it for `none`, nothing for a predictor with
    weights of its own, whose bytes are `predictor_bytes`, all read for every token. `shared_bytes` of the block belong
    to no neuron (the bias of down, and padding); where the block is split they go with the hot part. `kv_cache_bytes`
    at full context, for all sequences.

    `number_bytes` are what a neuron of a part takes besides: where a predictor makes one mask for both parts, each part
    has the numbers of its neurons. So a part of n neurons takes at most n · (`neuron_bytes` + `number_bytes`) +
    `SPLIT_BYTES` (of `counting`), the hot part `shared_bytes` more.
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

    @property
    def hot_launches(self) -> int:
        """Launches that hot neurons need: a predictor without weights of its own goes with them, as `sign` does."""
        return self.launches.hot + (0 if self.predictor_bytes else self.launches.predictor)


@dataclass(frozen=True)
class ModelBytes:
    """A whole model at one weight format, context and batch.

    `embedding_bytes` of which a token reads one row; `head_bytes` read in full for every token. Where they are one
    matrix (`tied`), it is counted as the head's and `embedding_bytes` is what is left (tables of positions).
    `table_bytes` are small tables that each device has for itself (rotary angles, the final norm, thresholds of
    predictors). `workspace_bytes` are activations and logits, on each device that computes. `hidden` in elements: what
    crosses between devices is float32 [hidden]. `head_launches` are those of the head on the GPU, with the final norm.
    """

    name: str
    quant: str
    predictor: str
    context: int
    batch: int
    hidden: int
    parameters: int
    layers: tuple[LayerBytes, ...]
    embedding_bytes: int
    head_bytes: int
    tied: bool
    table_bytes: int
    workspace_bytes: int
    head_launches: int


# A kernel that sends and one that receives: both are in the time of an exchange (`Machine.crossing_s`).
CROSSING_LAUNCHES = 2
