"""Generation with vLLM: as many engines as fit the ranks of a group, each in separate processes.

Status: tested on a CPU by hand (make test-vllm).

- ``checks``: what an engine cannot run, before any process starts.
- ``placement``: which ranks' GPUs an engine uses, on one node or several.
- ``gpu_memory``: how much of a GPU an engine may take beside the policy.
- ``interpreter``: the interpreter that engines run with, and whether it has vLLM.
- ``start``: start the engines.
- ``rollout``: the ``Rollout`` of the workers.
- ``vllm_engine``: requests to an engine, from any process.
- ``buckets``: weights in shared memory.
- ``engine_process``: start the process, call it, and report its death or silence.
- ``in_engine``: the files that run in the processes of the engine. They import vLLM, and nothing of this project.
"""
