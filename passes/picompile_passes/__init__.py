"""Graph dialect, pass contract, pipelines and passes of picompile.

`picompile.passes` exports the public API. This file imports nothing, so that dumps and predictor tables need no torch.
"""
