"""Products of pairs of bfloat16 with AVX-512 BF16, on vectors of 32-bit words that hold two numbers each.

Words are typed as float32 here: TVM turns arithmetic of bfloat16 into that of float32, and does not let values of that
type reach LLVM. So LLVM's intrinsics are called from functions in LLVM's own language, which are linked into each
kernel that uses them, and inlined.
"""

from tvm import tirx

from picompile_codegen.cpu.tensor import Expr, bind

LANES = 16

# LLVM functions for `KernelFunction.import_llvm`.
FUNCTIONS = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)

define <16 x float> @picompile_dot_bf16(<16 x float> %sums, <16 x float> %a, <16 x float> %b) alwaysinline nounwind {
  %x = bitcast <16 x float> %a to <32 x bfloat>
  %y = bitcast <16 x float> %b to <32 x bfloat>
  %z = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sums, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %z
}

define <16 x float> @picompile_to_bf16(<16 x float> %low, <16 x float> %high) alwaysinline nounwind {
  %x = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low)
  %y = bitcast <32 x bfloat> %x to <16 x float>
  ret <16 x float> %y
}
"""


def dot_pairs_of_bfloat16(sums: Expr, a: Expr, b: Expr) -> Expr:
    """sums + the products of both halves of each word: float32x16. Numbers below 1e-38 count as zeros."""
    return tirx.call_extern(f"float32x{LANES}", "picompile_dot_bf16", sums, a, b)


def to_bfloat16(low: Expr, high: Expr) -> Expr:
    """Round two float32x16, to nearest and even: their 32 numbers in order, two in each word."""
    return bind(tirx.call_extern(f"float32x{LANES}", "picompile_to_bf16", low, high))


def pair_words(first: Expr, second: Expr) -> Expr:
    """Round two float32x16, and pair their lanes: word i has element i of both."""
    rounded = bind(tirx.reinterpret(f"uint16x{2 * LANES}", to_bfloat16(first, second)))
    lanes = [lane for i in range(LANES) for lane in (i, LANES + i)]
    return bind(tirx.reinterpret(f"float32x{LANES}", bind(tirx.Shuffle([rounded], lanes))))
