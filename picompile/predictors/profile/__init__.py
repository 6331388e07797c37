"""Profiling: how a model's neurons fire on text, and samples of what its feed-forward blocks read, layer by layer."""

from picompile.predictors.profile.options import ProfileOptions
from picompile.predictors.profile.profile import LayerProfile, Profile, load_profile
from picompile.predictors.profile.run import profile_model
from picompile.predictors.profile.windows import held_out_windows

__all__ = ["LayerProfile", "Profile", "ProfileOptions", "held_out_windows", "load_profile", "profile_model"]
