"""Decoding of scales and codes of packed matrices in vectors, by the format's `Codec`."""

from collections.abc import Sequence

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.tensor import Expr, bind, intrinsic
from picompile_codegen.cpu.vector import splat, splat_int, to_floats
from picompile_passes.formats import E8M0, Codec

# Bytes that a shuffle looks up in a table of 16.
_TABLE = 16
_X86_SHUFFLES = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}
# Codes whose products are added up in pairs must be below this: `quantized.dot_pair` says why.
_MOST_UNSIGNED = 64


def scale_floats(form: Codec, stored: Expr, lanes: int) -> Expr:
    """Return the float32 scales of as many groups: the value of a raw code of 1."""
    if form.scale != E8M0:
        scales = to_floats(stored, lanes)
    else:
        exponents = tirx.Cast(f"int32x{lanes}", stored)
        scales = tirx.reinterpret(f"float32x{lanes}", exponents << splat_int(23, lanes))
    return scales if form.table_step == 1.0 else scales * splat(form.table_step, lanes)


def table_bias(form: Codec) -> int:
    """Return the offset that makes a table's values small unsigned bytes, or 0."""
    least = min(form.table)
    return -least if max(form.table) - least < _MOST_UNSIGNED else 0


def look_up(table: Sequence[int], codes: Expr, count: int, dtype: str) -> Expr:
    """Return the entries of `table`, 16 bytes, for `count` codes of uint8, as a vector of `dtype`, uint8 or int8."""
    entries = bytes(value & 255 for value in table).ljust(_TABLE, b"\0")
    words = [tirx.IntImm("int32", int.from_bytes(entries[i : i + 4], "little", signed=True)) for i in (0, 4, 8, 12)]
    words *= count // _TABLE
    vector = bind(tirx.Shuffle(words, list(range(len(words)))))
    values, indices = bind(tirx.reinterpret(f"int8x{count}", vector)), bind(tirx.reinterpret(f"int8x{count}", codes))
    if isa.current().machine == "x86_64":
        found = bind(intrinsic(f"int8x{count}", _X86_SHUFFLES[count], values, indices))
    else:
        found = _look_up_on_arm(values, indices, count)
    return found if dtype == "int8" else bind(tirx.reinterpret(f"{dtype}x{count}", found))


def _look_up_on_arm(values: Expr, indices: Expr, count: int) -> Expr:
    first = bind(tirx.Shuffle([values], list(range(_TABLE))))
    parts = [
        bind(
            intrinsic(
                f"int8x{_TABLE}",
                "llvm.aarch64.neon.tbl1.v16i8",
                first,
                bind(tirx.Shuffle([indices], list(range(start, start + _TABLE)))),
            )
        )
        for start in range(0, count, _TABLE)
    ]
    return parts[0] if len(parts) == 1 else bind(tirx.Shuffle(parts, list(range(count))))
