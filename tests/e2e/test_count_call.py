"""The path of one call stays short: from the group's method to Megatron's forward."""

from tests.count_call import count_call


def test_a_call_passes_at_most_13_frames_6_types_and_75_functions(ray_cluster: None) -> None:
    count = count_call()
    assert 1 <= len(count.controller) <= 5, count.controller
    assert count.process[0] == "mcontroller.ray.process.WorkerProcess.serve"
    assert not any(frame.startswith("mcontroller") for frame in count.process[1:]), count.process
    assert len(count.controller) + len(count.process) <= 13, [*count.controller, *count.process]
    assert len(count.types) <= 6, count.types
    functions = sorted(pair for pair in count.functions if pair[0].startswith("mcontroller."))
    assert 40 <= len(functions) <= 75 and len({module for module, _ in functions}) <= 18, functions
