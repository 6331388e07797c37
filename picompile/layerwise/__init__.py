"""Running a graph segment by segment, so that memory holds one layer's weights and not the model's.

All windows of tokens go through one segment before the weights of the next are read. What crosses a cut is kept, in
float32, for every window: for most models one vector of the hidden size for each token.
"""

from picompile.layerwise.perplexity import layerwise_perplexity
from picompile.layerwise.run import Observe, State, new_states, run_layerwise, run_segment
from picompile.layerwise.segments import Segment, split_layers

__all__ = [
    "Observe",
    "Segment",
    "State",
    "layerwise_perplexity",
    "new_states",
    "run_layerwise",
    "run_segment",
    "split_layers",
]
