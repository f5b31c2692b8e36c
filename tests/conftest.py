"""What every test runs under: no verdict hangs on how busy the machine is, or on the luck of a draw.

`make test` draws the same examples every time. `make test-all` draws new ones, to look further.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("fresh", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
