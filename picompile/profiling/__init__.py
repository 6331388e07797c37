"""Profiling: how a model's neurons fire on text, and samples of what its feed-forward blocks read, layer by layer."""

from picompile.profiling.load import load_profile
from picompile.profiling.options import ProfileOptions
from picompile.profiling.profile import LayerProfile, Profile
from picompile.profiling.run import profile_model
from picompile.profiling.tokens import held_out_windows

__all__ = [
    "LayerProfile",
    "Profile",
    "ProfileOptions",
    "held_out_windows",
    "load_profile",
    "profile_model",
]
