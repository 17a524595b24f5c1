"""Settings of all our tests."""

from hypothesis import HealthCheck, Phase, settings
from samples import samples

# Our machines are shared and slow at times: wall-clock deadlines would be flakes, not findings.
# The phase `explain` runs a failing example hundreds of times more, to comment on it.
settings.register_profile(
    "faultbed",
    deadline=None,
    max_examples=samples(100),
    suppress_health_check=[HealthCheck.too_slow],
    phases=(Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),
)
settings.load_profile("faultbed")
