"""How many random graphs the tests here draw."""

from hypothesis import settings

# Few where examples are the same at every run; `make fuzz` draws more.
PROFILE = settings(max_examples=20) if settings.default.derandomize else settings()
