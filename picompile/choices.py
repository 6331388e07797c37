"""The choices that compiling and planning share, with their limits and defaults."""

from picompile.errors import UsageError

# The formats of matrices. With those of 4 bits the output head and embeddings are in q6.
QUANTIZATIONS = ("f16", "q8", "q6", "q4m", "q4")
# How weights are rounded: so that errors on calibration text make up for each other, or each to the nearest value.
ROUNDINGS = ("calibrated", "nearest")
# The formats that round so coarsely that calibration is worth its time.
CALIBRATED = ("q6", "q4m", "q4")
DEFAULT_ROUNDING_TOKENS = 32_768
PREDICTORS = ("exact", "learned", "sign", "none")
# Predictors that leave out no neuron that fires. They need neither training nor an accuracy check.
LOSSLESS = ("exact", "none")
# Element types of the key/value cache, and what the code generator calls them.
KV_DTYPES = {"f16": "float16", "f32": "float32", "q8": "q8"}
DEFAULT_CONTEXT = 4096
MOST_SEQUENCES = 256
CHUNK = 64
# The accuracy bound: by which share the predictors may raise the perplexity.
DEFAULT_ACCURACY_BOUND = 0.001
# No model has so many layers; files and pictures of layers beyond it are neither looked for nor drawn.
MOST_LAYERS = 10_000


def default_kv_dtype(activation: str) -> str:
    """Return the key of `KV_DTYPES` for a model with `activation` (the dialect's text): f32 for FATReLU, else f16.

    FATReLU jumps at its threshold: what a float16 cache rounds off moves neurons across and changes the logits.
    """
    return "f32" if activation.startswith("fatrelu") else "f16"


def default_predictor(activation: str) -> str:
    """Return the lossless predictor for `activation` (the dialect's text): `exact` if neurons can be silent."""
    from picompile_passes.dialect.activations import parse_activation

    return "exact" if parse_activation(activation).sparse else "none"


def resolve_context(context: int | None, positions: int | None) -> int:
    """Return `context`, or its default: the model's `positions` (None: no limit), at most `DEFAULT_CONTEXT` tokens.

    Raises:
        UsageError: `context` is more than the model's positions.
    """
    if context is None:
        return min(positions or DEFAULT_CONTEXT, DEFAULT_CONTEXT)
    if positions and context > positions:
        raise UsageError(f"a context of {context} tokens is more than the model's {positions} positions")
    return context
