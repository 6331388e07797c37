"""Skipping neurons that contribute little: those below limits, without a predictor, for any activation.

`sensitivities.py` measures how much the model's predictions depend on each neuron, `limits.py` turns that
into limits, `search.py` finds the largest with which perplexity stays within a bound, and `calibration.py` does all
of this for one compilation and keeps the result.
"""
