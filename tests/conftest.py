"""Settings of all our tests."""

from hypothesis import HealthCheck, settings

# Our machines are shared and slow at times: wall-clock deadlines would be flakes, not findings.
settings.register_profile("faultbed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("faultbed")
