"""Instructions that compute a result from registers alone, as a table: what is not in it is not known.

Expressions are C++, with the sources as {0}, {1} and {2}. Integers are added and multiplied as unsigned ones, which
keep the low bits of the result whatever the sign. An instruction of floats that names no rounding may be contracted by
ptxas ("add", "mul"), so results on a GPU may differ in the last bit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from helpers.ptx.syntax import C_TYPES


@dataclass(frozen=True)
class Rule:
    """Types of the result and of the sources, and the expression."""

    result: str
    sources: tuple[str, ...]
    expression: str


_Rules = Iterator[tuple[str, Rule]]

# Comparisons, and those of floats that are also true where one of the two is NaN.
_ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_UNORDERED = {"neu": "==", "leu": ">", "ltu": ">=", "gtu": "<=", "geu": "<"}
_LOGIC = {"and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}"}


def _integers() -> _Rules:
    for bits in (16, 32, 64):
        unsigned, wide = f"u{bits}", {16: "u32", 32: "u64"}.get(bits)
        for name in (f"s{bits}", unsigned):
            yield f"add.{name}", Rule(unsigned, (unsigned,) * 2, "{0} + {1}")
            yield f"sub.{name}", Rule(unsigned, (unsigned,) * 2, "{0} - {1}")
            yield f"mul.lo.{name}", Rule(unsigned, (unsigned,) * 2, "(uint64_t){0} * {1}")
            yield f"mad.lo.{name}", Rule(unsigned, (unsigned,) * 3, "(uint64_t){0} * {1} + {2}")
            yield f"min.{name}", Rule(name, (name,) * 2, "{0} < {1} ? {0} : {1}")
            yield f"max.{name}", Rule(name, (name,) * 2, "{0} > {1} ? {0} : {1}")
            yield f"div.{name}", Rule(name, (name,) * 2, "{0} / {1}")
            yield f"rem.{name}", Rule(name, (name,) * 2, "{0} % {1}")
            yield f"shr.{name}", Rule(name, (name, "u32"), "ptx_shift_right({0}, {1})")
            if wide:
                result = wide.replace("u", name[0])
                product = f"({C_TYPES[result]}){{0}} * {{1}}"
                yield f"mul.wide.{name}", Rule(result, (name,) * 2, product)
                yield f"mad.wide.{name}", Rule(wide, (name, name, wide), f"({C_TYPES[wide]})({product}) + {{2}}")
        yield f"neg.s{bits}", Rule(unsigned, (unsigned,), "0 - {0}")
        yield f"shl.b{bits}", Rule(unsigned, (unsigned, "u32"), "ptx_shift_left({0}, {1})")
        yield f"shr.b{bits}", Rule(unsigned, (unsigned, "u32"), "ptx_shift_right({0}, {1})")
        yield f"not.b{bits}", Rule(unsigned, (unsigned,), "~{0}")
        for name, expression in _LOGIC.items():
            yield f"{name}.b{bits}", Rule(unsigned, (unsigned,) * 2, expression)
    for name in ("s32", "u32"):
        wide = name.replace("32", "64")
        yield f"mul.hi.{name}", Rule(name, (name,) * 2, f"({C_TYPES[wide]}){{0}} * {{1}} >> 32")


def _words() -> _Rules:
    three = ("b32",) * 3
    yield "prmt.b32", Rule("b32", three, "__byte_perm({0}, {1}, {2})")
    yield "bfi.b32", Rule("b32", ("b32",) * 4, "ptx_insert({0}, {1}, {2}, {3})")
    yield "popc.b32", Rule("u32", ("b32",), "__popc({0})")
    yield "dp2a.lo.u32.u32", Rule("u32", three, "ptx_dot_low({0}, {1}, {2})")
    for name, text in (("add", "add"), ("sub", "subtract"), ("mul", "multiply")):
        yield f"{name}.f16x2", Rule("f16x2", ("f16x2",) * 2, f"ptx_{text}_pairs({{0}}, {{1}})")
    yield "fma.rn.f16x2", Rule("f16x2", ("f16x2",) * 3, "ptx_fma_pairs({0}, {1}, {2})")
    # The first source is the high half.
    packed = "(uint32_t)emulated_float_to_half({0}) << 16 | emulated_float_to_half({1})"
    yield "cvt.rn.f16x2.f32", Rule("f16x2", ("f32",) * 2, packed)


def _floats() -> _Rules:
    for rounding in ("", ".rn"):
        for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
            yield f"{name}{rounding}.f32", Rule("f32", ("f32",) * 2, f"{{0}} {sign} {{1}}")
    yield "div.rn.f32", Rule("f32", ("f32",) * 2, "{0} / {1}")
    yield "rcp.rn.f32", Rule("f32", ("f32",), "1.0f / {0}")
    yield "sqrt.rn.f32", Rule("f32", ("f32",), "__builtin_sqrtf({0})")
    yield "fma.rn.f32", Rule("f32", ("f32",) * 3, "__builtin_fmaf({0}, {1}, {2})")
    yield "fma.rm.f32", Rule("f32", ("f32",) * 3, "ptx_fma_down({0}, {1}, {2})")
    yield "ex2.approx.ftz.f32", Rule("f32", ("f32",), "ptx_exp2({0})")
    yield "max.f32", Rule("f32", ("f32",) * 2, "ptx_max({0}, {1})")
    yield "min.f32", Rule("f32", ("f32",) * 2, "ptx_min({0}, {1})")
    yield "abs.f32", Rule("f32", ("f32",), "__builtin_fabsf({0})")
    yield "neg.f32", Rule("f32", ("f32",), "-{0}")


def _choices() -> _Rules:
    """Yield comparisons, predicates and selections."""
    integers = [f"{kind}{bits}" for kind in "us" for bits in (16, 32, 64)]
    raw = [f"b{bits}" for bits in (16, 32, 64)]
    for name, sign in _ORDERED.items():
        for each in (*integers, "f32", *(raw if name == "eq" else ())):
            yield f"setp.{name}.{each}", Rule("pred", (each,) * 2, f"{{0}} {sign} {{1}}")
    for each in (*integers, *raw):
        yield f"setp.ne.{each}", Rule("pred", (each,) * 2, "{0} != {1}")
    # Of floats it is false where one is NaN.
    yield "setp.ne.f32", Rule("pred", ("f32",) * 2, "{0} < {1} || {0} > {1}")
    for name, sign in _UNORDERED.items():
        yield f"setp.{name}.f32", Rule("pred", ("f32",) * 2, f"!({{0}} {sign} {{1}})")
    for each in (*integers, *raw, "f32"):
        yield f"selp.{each}", Rule(each, (each, each, "pred"), "{2} ? {0} : {1}")
    for name, expression in _LOGIC.items():
        yield f"{name}.pred", Rule("pred", ("pred",) * 2, expression)
    yield "not.pred", Rule("pred", ("pred",), "!{0}")


def _conversions() -> _Rules:
    """Yield moves and conversions. What is narrower than its register is in the low bits."""
    for each in ("u16", "s16", "b16", "u32", "s32", "b32", "f32", "u64", "s64", "b64", "pred"):
        yield f"mov.{each}", Rule(each, (each,), "{0}")
    integers = [f"{kind}{bits}" for kind in "us" for bits in (8, 16, 32, 64)]
    for source in integers:
        for target in integers:
            if source != target:
                yield f"cvt.{target}.{source}", Rule(target, (source,), "{0}")
        yield f"cvt.rn.f32.{source}", Rule("f32", (source,), "(float){0}")
        yield f"cvt.rzi.{source}.f32", Rule(source, ("f32",), f"ptx_to_integer<{C_TYPES[source]}>(truncf({{0}}))")
    yield "cvt.rni.f32.f32", Rule("f32", ("f32",), "rintf({0})")
    yield "cvt.sat.f32.f32", Rule("f32", ("f32",), "ptx_saturated({0})")
    yield "cvt.f32.f16", Rule("f32", ("f16",), "emulated_half_to_float({0})")
    yield "cvt.rn.f16.f32", Rule("f16", ("f32",), "emulated_float_to_half({0})")
    # Addresses of global memory are generic ones.
    yield "cvta.to.global.u64", Rule("u64", ("u64",), "{0}")


RULES: Mapping[str, Rule] = dict(
    each for rules in (_integers, _words, _floats, _choices, _conversions) for each in rules()
)
