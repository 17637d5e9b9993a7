"""The advantage estimators that come with mcontroller. Importing this package registers them."""

import trainer.estimators.built_in  # noqa: F401
