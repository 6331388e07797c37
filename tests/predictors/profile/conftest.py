import functools
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _captured_once() -> Iterator[None]:
    """Capture takes a second and gives the same every time."""
    from picompile.predictors.profile import prepare, run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "capture", functools.cache(run.capture))
        patch.setattr(prepare, "open_checkpoint", functools.cache(prepare.open_checkpoint))
        yield
