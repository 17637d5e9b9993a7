"""The advantage estimators that come with mcontroller. Importing this package registers them."""

import mcontroller.ppo.estimators.gae
import mcontroller.ppo.estimators.groups
import mcontroller.ppo.estimators.reinforce  # noqa: F401
