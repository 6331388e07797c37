"""Training of predictors: one layer after another, each a job of its own, then a choice over all layers.

    profile = load_profile(Path("profile"))
    predictors = train_predictors(Path("model"), profile, Path("predictors"), TrainOptions(gate=0.001))

1. jobs      each layer is trained at several ranks (`fit_layer`); all of these candidates are kept
2. choice    one candidate a layer, so that the fewest bytes are read within the budget of parameters
3. gate      the model's perplexity with all predictors; beyond the bound, layers that miss most get larger ones
"""

from typing import TYPE_CHECKING

from picompile.lazy import lazy
from picompile.predictors.train.options import TrainOptions

if TYPE_CHECKING:
    from picompile.predictors.train.choose import tighten
    from picompile.predictors.train.run import train_predictors

__all__ = ["TrainOptions", "tighten", "train_predictors"]


_HOME = {"tighten": "picompile.predictors.train.choose", "train_predictors": "picompile.predictors.train.run"}

# Worker processes need neither.
__getattr__ = lazy(__name__, _HOME)
