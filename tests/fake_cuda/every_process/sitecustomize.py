"""Turn the fake CUDA device on in a new process, which imports this file if the folder is on PYTHONPATH."""

import tests.fake_cuda.plugin  # noqa: F401
