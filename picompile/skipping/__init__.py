"""Skipping what contributes little: neurons below limits, with no predictor, in models of any activation.

`sensitivities.py` measures how much the model's predictions depend on each neuron, `limits.py` makes
limits of that, `search.py` finds the largest with which perplexity stays within a bound, and `calibration.py` does all
of this for one compilation and keeps the result.
"""
