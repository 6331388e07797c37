"""AutoRound: its checkpoints have GPTQ's or AWQ's tensors, and bits and groups of their own for some modules."""

from collections.abc import Callable

from picompile.frontend.stored.awq import find_awq
from picompile.frontend.stored.gptq import GptqConfig, find_gptq
from picompile.frontend.stored.grouped import groupings
from picompile.frontend.stored.record import Found, Method, Settings, StoredFiles

# Formats that store zeros less 1, and formats that store them as they are: auto_round's inference/backend.py. An
# asymmetric checkpoint of its own format stores them as they are.
_LESS_ONE = ("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq", "gptq")
_AS_THEY_ARE = ("auto_round", "auto_round:gptqmodel", "auto_round:tritonv2", "auto_round:exllamav2")
_AWQ = ("auto_round:auto_awq", "auto_round:awq", "auto_awq", "awq")


def _open(settings: Settings) -> Callable[[StoredFiles], Found]:
    form = settings.get("packing_format", "backend", default="auto_round:auto_gptq")
    if form not in (*_LESS_ONE, *_AS_THEY_ARE, *_AWQ):
        settings.refuse(f"in the format {form!r:.40}")
    data_type, act_bits = settings.get("data_type", default="int"), settings.get("act_bits", default=16)
    if not str(data_type).startswith("int"):
        settings.refuse(f"with data_type {data_type!r:.40}")
    if act_bits not in (16, 32):
        settings.refuse(f"with act_bits {act_bits!r:.20}")
    settings.without("rotation_config", "svdquant_config", "super_bits")
    overrides = settings.get("extra_config", default={})
    if not isinstance(overrides, dict):
        settings.refuse(f"with extra_config {overrides!r:.40}")
    if form in _AWQ:
        return find_awq(groupings(settings, (4,), overrides))
    symmetric = settings.get("sym", default=True) is True
    found = groupings(settings, (2, 3, 4, 8), overrides)
    return find_gptq(GptqConfig(found, less_one=form in _LESS_ONE, symmetric=symmetric, ordered=False))


METHOD = Method(
    names=("auto-round", "intel/auto-round"),
    title="AutoRound",
    summary="auto-round of 2, 3, 4 and 8 bits (as GPTQ or AWQ)",
    marks=(".qweight",),
    open=_open,
)
