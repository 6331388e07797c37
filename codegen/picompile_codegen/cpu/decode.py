"""Decoding of scales and codes of packed matrices in vectors, by the format's `Codec`."""

from collections.abc import Sequence

from tvm import tirx

from picompile_codegen.build import isa
from picompile_codegen.cpu.tensor import Expr, bind, intrinsic, select
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


# Put into the exponent and the mantissa of a float32, the bits of an E4M3 number stand for 2^-120 of it: biases are 127
# and 7.
_E4M3_BITS = 8
_E4M3_UNIT = 2.0**120


def number_unit(form: Codec) -> float:
    """Return what `numbers_at` are multiples of, in a format that has floats."""
    return _E4M3_UNIT if form.data_bits == _E4M3_BITS else 1.0


def numbers_at(form: Codec, words: Expr, bit: int, lanes: int) -> Expr:
    """Return the numbers whose codes begin at bit `bit` of uint32 words, over `number_unit`: float32 of each lane.

    No instruction on the way takes numbers below the least normal float32 for 0, as those of E4M3 may be.
    """
    if form.data_bits == _E4M3_BITS:
        high = bind(words << _splat_word(24 - bit, lanes)) if bit < 24 else words
        magnitude = (high >> _splat_word(4, lanes)) & _splat_word(0x07F00000, lanes)
        return bind(tirx.reinterpret(f"float32x{lanes}", bind(magnitude | (high & _splat_word(0x80000000, lanes)))))
    codes = bind(words >> _splat_word(bit, lanes)) if bit else words
    return _permuted(form.table, bind(tirx.reinterpret(f"int32x{lanes}", codes)), lanes)


def _permuted(table: Sequence[float], codes: Expr, lanes: int) -> Expr:
    """Return the entries of a table of 16 float32 for the lowest four bits of each code, int32 of each lane."""
    floats = f"float32x{lanes}"
    vectors = [
        bind(
            tirx.Shuffle(
                [tirx.FloatImm("float32", value) for value in table[start : start + lanes]], list(range(lanes))
            )
        )
        for start in range(0, _TABLE, lanes)
    ]
    if isa.current().machine != "x86_64":
        # NEON permutes bytes alone, so that this is a choice for each entry.
        low = bind(codes & splat_int(_TABLE - 1, lanes))
        found = splat(table[0], lanes)
        for code, value in enumerate(table[1:], start=1):
            found = bind(select(tirx.EQ(low, splat_int(code, lanes)), splat(value, lanes), found))
        return found
    if lanes == _TABLE:
        return bind(intrinsic(floats, "llvm.x86.avx512.permvar.sf.512", vectors[0], codes))
    first, second = (bind(intrinsic(floats, "llvm.x86.avx2.permps", vector, codes)) for vector in vectors)
    # A shift leaves the fourth bit as the sign.
    signs = bind(codes << splat_int(28, lanes))
    return bind(select(signs < splat_int(0, lanes), second, first))


def _splat_word(value: int, lanes: int) -> Expr:
    return tirx.Broadcast(tirx.IntImm("uint32", value), lanes)


def table_bias(form: Codec) -> int:
    """Return the offset that makes a table's values small unsigned bytes, or 0."""
    if form.has_floats:
        return 0
    least = int(min(form.table))
    return -least if max(form.table) - least < _MOST_UNSIGNED else 0


def look_up(table: Sequence[float], codes: Expr, count: int, dtype: str) -> Expr:
    """Return the entries of `table`, 16 bytes, for `count` codes of uint8, as a vector of `dtype`, uint8 or int8."""
    entries = bytes(int(value) & 255 for value in table).ljust(_TABLE, b"\0")
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
