"""Bytes of a model as packed, by what reads them, and the launches that read them on a GPU."""

from dataclasses import dataclass


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
    `neuron_bytes` each (gate, up, down and elements of biases), of which `deciding_bytes` are read whether or not the
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
    deciding_bytes: int
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
