"""Solve times of placements."""
