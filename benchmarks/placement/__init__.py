"""Placements: solve times, policies and safety."""
