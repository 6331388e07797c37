"""The accuracy of an artifact against its checkpoint: the cost of each lossy part, on held-out text.

`intervals.py` has means with confidence intervals, `distances.py` compares next-token distributions, `variants.py` has
the model with one lossy part after another, `measure.py` reads the text with each, and `comparison.py` is the result.
"""
