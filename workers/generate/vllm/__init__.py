"""Generation with vLLM: an engine for each data-parallel shard, in a process of its own.

- ``checks``: what an engine cannot run, before any process starts.
- ``rollout``: the ``Rollout`` of the workers.
- ``requests``: prompts and sampling as requests of vLLM, and its answers as responses.
- ``buckets``: weights in shared memory.
- ``engine_process``: start the process, call it, and report its death or silence.
- ``in_engine``: the files that run in the processes of the engine. They import vLLM, and nothing of this project.
"""
