"""Measuring an engine: speed, memory bandwidth, traces and perplexity."""
