"""The advantage estimators that come with mcontroller. Importing this package registers them."""

import mcontroller.ppo.estimators.built_in  # noqa: F401
