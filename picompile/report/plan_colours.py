"""What the pictures of a plan tell apart, each with the same colour in all of them."""

from picompile.report.drawing import FAINT, MUTED, SERIES, drawable

PARTS = {
    "hot": ("hot neurons", SERIES[1]),
    "cold": ("cold neurons", SERIES[0]),
    "attention": ("attention", SERIES[2]),
    "kv_cache": ("KV cache", SERIES[3]),
    "predict": ("predictor", SERIES[4]),
    "exchange": ("exchange", MUTED),
}
"""The parts of a layer's time → (name, colour)."""

STEPS = {**PARTS, "head": ("output head", SERIES[5]), "switch": ("transfer", MUTED), "end": ("transfer", MUTED)}
"""The steps of a schedule → (name, colour)."""

DEVICES = {"gpu": "GPU", "host": "host", "link": "link"}

_KINDS = {
    "hot neurons": ("hot neurons", SERIES[1]),
    "cold neurons": ("cold neurons", SERIES[0]),
    "attention": ("attention", SERIES[2]),
    "kv cache": ("KV cache", SERIES[3]),
    "predictors": ("predictors", SERIES[4]),
    "output head": ("embedding, output head", SERIES[5]),
    "embedding": ("embedding, output head", SERIES[5]),
    "workspace": ("workspace, tables", MUTED),
    "tables": ("workspace, tables", MUTED),
}


def kind_of_memory(what: str) -> tuple[str, str]:
    """(name in the legend, colour) of what memory is taken for; several kinds may share one."""
    return _KINDS.get(what) or (drawable(what), FAINT)
