"""Graphs as passes see them: nodes, rewriting, values, dumps, source."""
