"""Every kernel's name, parameters and arguments, declared once for host and accelerator.

`cpu.write_kernel(spec)` and `cuda.write_kernel(spec)` write the kernel of a spec: the body is found by the spec's type
(`picompile_codegen.backend`), and takes its arguments by the names that the spec gives them.

A new spec need not be exported here: import it from its module.
"""

from picompile_codegen.specs.arguments import (
    FLAG_SHAPE,
    STEP_SHAPE,
    Access,
    KernelArgument,
    KernelSpec,
    Mode,
    symbol,
)
from picompile_codegen.specs.attention import AttentionSpec, BorrowCacheSpec, CacheWriteSpec, LendCacheSpec
from picompile_codegen.specs.experts import ExpertsSpec
from picompile_codegen.specs.ffn import CountedFfnSpec, FfnSpec, PredictLowRankSpec, PredictSignsSpec, WholeFfnSpec
from picompile_codegen.specs.fused import LinearAddSpec, Norm, SumNormSpec
from picompile_codegen.specs.route import RouteSpec
from picompile_codegen.specs.tokens import (
    MOST_TOP_LOGITS,
    AddSpec,
    DivideByRmsSpec,
    ElementwiseSpec,
    EmbeddingSpec,
    JoinColumnsSpec,
    LayerNormSpec,
    LinearSpec,
    RmsNormSpec,
    RotarySpec,
    TakeLastSpec,
    TopLogitsSpec,
)
from picompile_codegen.specs.transfer import (
    CopyWordsSpec,
    CountedSendMaskSpec,
    PingPongSpec,
    ReceiveMaskSpec,
    ReceiveSpec,
    SendMaskSpec,
    SendSpec,
    SignalSpec,
    UploadSpec,
    WaitSpec,
)

__all__ = [
    "FLAG_SHAPE",
    "MOST_TOP_LOGITS",
    "STEP_SHAPE",
    "Access",
    "AddSpec",
    "AttentionSpec",
    "BorrowCacheSpec",
    "CacheWriteSpec",
    "CopyWordsSpec",
    "CountedFfnSpec",
    "CountedSendMaskSpec",
    "DivideByRmsSpec",
    "ElementwiseSpec",
    "EmbeddingSpec",
    "ExpertsSpec",
    "FfnSpec",
    "JoinColumnsSpec",
    "KernelArgument",
    "KernelSpec",
    "LayerNormSpec",
    "LendCacheSpec",
    "LinearAddSpec",
    "LinearSpec",
    "Mode",
    "Norm",
    "PingPongSpec",
    "PredictLowRankSpec",
    "PredictSignsSpec",
    "ReceiveMaskSpec",
    "ReceiveSpec",
    "RmsNormSpec",
    "RotarySpec",
    "RouteSpec",
    "SendMaskSpec",
    "SendSpec",
    "SignalSpec",
    "SumNormSpec",
    "TakeLastSpec",
    "TopLogitsSpec",
    "UploadSpec",
    "WaitSpec",
    "WholeFfnSpec",
    "symbol",
]
