"""Profiling: how a model's neurons fire on text, and samples of what its feed-forward blocks read, layer by layer."""

from typing import TYPE_CHECKING

from picompile.lazy import lazy

if TYPE_CHECKING:
    from picompile.predictors.profile.options import ProfileOptions
    from picompile.predictors.profile.profile import LayerProfile, Profile, load_profile
    from picompile.predictors.profile.run import profile_model
    from picompile.predictors.profile.windows import held_out_windows

__all__ = ["LayerProfile", "Profile", "ProfileOptions", "held_out_windows", "load_profile", "profile_model"]

# Imported on first use: most of it needs torch.
_HOME = {
    "LayerProfile": "picompile.predictors.profile.profile",
    "Profile": "picompile.predictors.profile.profile",
    "ProfileOptions": "picompile.predictors.profile.options",
    "held_out_windows": "picompile.predictors.profile.windows",
    "load_profile": "picompile.predictors.profile.profile",
    "profile_model": "picompile.predictors.profile.run",
}

__getattr__ = lazy(__name__, _HOME)
