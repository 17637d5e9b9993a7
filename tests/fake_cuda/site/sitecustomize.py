"""Turn the pretended GPU on in every process of a run of gpucheck that may see GPUs, as CUDA is there in each of them.

A folder with this file is the first of PYTHONPATH, so that Python imports it when a process starts.
"""

import os
import sys

if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and any("gpucheck" in word for word in sys.orig_argv):
    import tests.fake_cuda.plugin  # noqa: F401
