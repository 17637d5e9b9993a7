"""The policy losses that come with mcontroller, and how they are averaged. Importing this package registers them."""

import mcontroller.ppo.losses.policy  # noqa: F401
