"""Settings of hypothesis, whose examples here are graphs: slow to draw, and the same ones in every run."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=10, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")
