"""Groups in the calling process: the same interface without Ray, for breakpoints, tests and thousands of ranks."""

from mcontroller.local.executor import LocalExecutor
from mcontroller.local.group import LocalWorkerGroup

__all__ = ["LocalExecutor", "LocalWorkerGroup"]
