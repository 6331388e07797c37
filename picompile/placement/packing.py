"""How a model is to be packed and run: what its bytes are counted for."""

from dataclasses import dataclass

from picompile.choices import CHUNK, DEFAULT_CONTEXT, KV_DTYPES, PREDICTORS, QUANTIZATIONS
from picompile.errors import UsageError


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
