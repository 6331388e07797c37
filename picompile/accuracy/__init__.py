"""The accuracy of an artifact against its checkpoint: what each lossy part costs, on held-out text.

`intervals.py` has means with confidence intervals, `distances.py` compares next-token distributions, `variants.py` has
the model with one lossy part after another, `measure.py` reads the text with each, and `comparison.py` is the result.
"""

from typing import TYPE_CHECKING

from picompile.lazy import lazy

if TYPE_CHECKING:
    from picompile.accuracy.comparison import CheckpointComparison, VariantAccuracy
    from picompile.accuracy.measure import ComparedArtifact, compare_variants
    from picompile.accuracy.variants import Variant
    from picompile.intervals import Estimate

__all__ = [
    "CheckpointComparison",
    "ComparedArtifact",
    "Estimate",
    "Variant",
    "VariantAccuracy",
    "compare_variants",
]

# Imported on first use: measuring needs torch.
_HOME = {
    "CheckpointComparison": "picompile.accuracy.comparison",
    "ComparedArtifact": "picompile.accuracy.measure",
    "Estimate": "picompile.intervals",
    "Variant": "picompile.accuracy.variants",
    "VariantAccuracy": "picompile.accuracy.comparison",
    "compare_variants": "picompile.accuracy.measure",
}

__getattr__ = lazy(__name__, _HOME)
