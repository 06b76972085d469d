"""What all tests share: small stores, baked once, and a home for plans that is not the user's."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# No time limits: machines that run tests are busy. The same examples on every run, so that CI does not flicker.
settings.register_profile(
    "penstock", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("penstock")
