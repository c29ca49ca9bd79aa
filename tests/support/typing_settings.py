"""Settings for the type checker: the control plane's own, under an environment that names nothing real."""

import os

os.environ.update(
    DATABASE_URL="postgresql://nobody@localhost/none",
    REDIS_URL="redis://localhost:1/0",
    FAIRLANE_SECRET_KEY="for the type checker only",
    FAIRLANE_KEY_PEPPER="00" * 32,
)

from controlplane.settings import *  # noqa: F403 (the environment comes first; settings are their module's names)
