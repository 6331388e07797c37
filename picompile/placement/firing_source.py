"""Where it comes from how often a model's neurons fire: a curve, a profile that is there, or one that is made."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from picompile.progress import Progress

if TYPE_CHECKING:
    from picompile.placement.firing import Firing
    from picompile.profiling import Profile, ProfileOptions

NOT_KEPT = "a profile made for this plan"
# Which neurons fire most is known from fewer tokens than it takes to train predictors. Of the bundled model the hottest
# 10, 30 and 50 % by so many tokens make 99.4 % of the firings (98.9 at least) that those by 65,536 make; by half as
# many 98.9 % (97.9).
_TOKENS = 16_384


@dataclass(frozen=True)
class FiringSource:
    """How neurons fire, from a profile or from a curve. `source` names a profile that is not kept."""

    profile: "Profile | None"
    curve: str | None = None
    source: str | None = None

    def firing(self, shape: tuple[int, int], batch: int = 1, ratios: Mapping[int, float] | None = None) -> "Firing":
        """Of `shape` (layers, neurons), with so many computed for one that fires."""
        from picompile.placement.curves import firing_of_curve, firing_of_profile

        if self.profile is not None:
            firing = firing_of_profile(self.profile, batch, ratios)
            return firing if self.source is None else replace(firing, source=self.source)
        ratio = sum(ratios.values()) / len(ratios) if ratios else 1.0
        return firing_of_curve(str(self.curve), *shape, batch=batch, computed=ratio)


def given_profile(profile: Path | None, work: Path | None, fingerprint: str) -> "Profile | None":
    """The profile in the folder `profile`, or else the one that lies in the folder `work`; None where one has to be
    made. Raises `UsageError` for one of another model.
    """
    from picompile.profiling import load_profile
    from picompile.profiling.profile import read_description

    if profile is None:
        if work is None or not (read_description(work / "profile") or {}).get("complete"):
            return None
        profile = work / "profile"
    found = load_profile(profile)
    found.require_model(fingerprint)
    return found


@contextmanager
def made_profile(
    model: Path, work: Path | None, options: "ProfileOptions", progress: Progress
) -> Iterator[FiringSource]:
    """A profile of `model` that is made in the folder `work`. Without one it goes again, and is no longer than a plan
    needs. Raises what profiling does.
    """
    from picompile.profiling import profile_model
    from picompile_codegen.temporary import temporary_folder

    if work is not None:
        work.mkdir(parents=True, exist_ok=True)
        yield FiringSource(profile_model(model, work / "profile", options, progress))
        return
    with temporary_folder() as folder:
        short = replace(options, tokens=min(options.tokens, _TOKENS), samples=1)
        profile = profile_model(model, folder / "profile", short, progress)
        yield FiringSource(profile, source=NOT_KEPT)
