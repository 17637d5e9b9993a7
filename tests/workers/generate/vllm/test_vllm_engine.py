"""Requests to engines of vLLM, stand-ins behind the real socket, in one process."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.generate.vllm.stand_in import EngineInProcess, StandInLLM, standing_in
from workers import RolloutConfig, Sampling
from workers.generate.engine_protocol import EngineLost, RequestFailed
from workers.generate.vllm.vllm_engine import VllmAddress, VllmEngine, sampling_parameters

SAMPLING = {"response_length": 8, "eos_token_id": [2], "seed": 5}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[EngineInProcess]:
    (tmp_path / "config.json").write_text('{"vocab_size": 97}')
    with standing_in():
        engine = EngineInProcess({"model": str(tmp_path), "max_model_len": 1300, "enable_sleep_mode": False}, {})
        address_of(engine)
        yield engine


def address_of(served: EngineInProcess) -> VllmAddress:
    port = served.call("listen", host="127.0.0.1", token="secret")
    config = RolloutConfig(engine="vllm", prompt_length=1200, response_length=8)
    return VllmAddress("127.0.0.1", port, "secret", config)


async def generate(engine: VllmEngine, *prompt: int, **changes: Any) -> Any:
    return await engine.generate(array("q", prompt), {**SAMPLING, **changes})


def test_requests_get_their_own_tokens_and_a_rejected_one_disturbs_no_other(served: EngineInProcess) -> None:
    async def run() -> tuple[list[Any], RequestFailed]:
        engine = address_of(served).connect()
        requests = [generate(engine, first, 4) for first in range(20)]
        failed, *made = await asyncio.gather(generate(engine, *[3] * 1300), *requests, return_exceptions=True)
        await engine.close()
        return made, failed

    made, failed = asyncio.run(run())
    assert [response.tokens.tolist() for response in made] == [[first + 4, 2] for first in range(20)]
    assert all(response.log_probs.tolist() == [-float(token) for token in response.tokens] for response in made)
    assert isinstance(failed, RequestFailed) and failed.length == 1300
    assert served.llm.parameters[0]["max_tokens"] == 8 and "seed" not in served.llm.parameters[0]


def test_an_engine_refuses_a_wrong_token(served: EngineInProcess) -> None:
    with pytest.raises(EngineLost):
        asyncio.run(generate(replace(address_of(served), token="guess").connect(), 3))


def test_a_request_that_is_cancelled_ends_in_the_engine_and_one_of_a_lost_engine_raises(
    served: EngineInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInLLM, "answer", staticmethod(lambda prompt: [3] * 100_000))

    async def run() -> None:
        engine = address_of(served).connect()
        requests = [asyncio.ensure_future(generate(engine, 3, number)) for number in range(2)]
        while len(served.llm.in_flight) < 2:
            await asyncio.sleep(0.001)
        requests[0].cancel()
        while len(served.llm.in_flight) == 2:
            await asyncio.sleep(0.001)
        await engine.close()
        for _ in range(2):
            with pytest.raises(EngineLost):
                await requests[1]
            requests[1] = asyncio.ensure_future(generate(engine, 3))
        while served.llm.in_flight:
            await asyncio.sleep(0.001)  # the engine ends what nobody waits for

    asyncio.run(run())


def test_a_request_that_is_cancelled_while_it_waits_for_others_is_not_begun(
    served: EngineInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInLLM, "answer", staticmethod(lambda prompt: [3] * (100_000 if prompt[0] == 3 else 1)))

    async def run() -> None:
        engine = address_of(served).connect()
        first = asyncio.ensure_future(generate(engine, 3))
        while not served.llm.in_flight:
            await asyncio.sleep(0.001)
        waiting = asyncio.ensure_future(generate(engine, 4, temperature=0.5))
        await asyncio.sleep(0.01)
        waiting.cancel()
        first.cancel()
        await generate(engine, 5, temperature=0.25)
        assert served.llm.prompts == [[3], [5]]
        await engine.close()

    asyncio.run(run())


def test_an_engine_that_is_silent_while_requests_wait_is_lost(served: EngineInProcess) -> None:
    async def run() -> None:
        address = address_of(served)
        config = replace(address.config, vllm=replace(address.config.vllm, silence_timeout_s=0.1))
        engine = replace(address, config=config).connect()
        await generate(engine, 3)
        await asyncio.sleep(0.2)  # nothing is waited for
        await generate(engine, 3)
        served.llm.running.clear()
        served.llm.is_hanging = True
        with pytest.raises(EngineLost):
            await generate(engine, 3)

    asyncio.run(run())


def test_an_engine_hands_out_tokens_while_it_generates(
    served: EngineInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StandInLLM, "answer", staticmethod(lambda prompt: [*range(3, 20), 2]))

    async def run() -> tuple[list[Any], Any, Any]:
        engine, parts = address_of(served).connect(), []
        rest = await engine.generate(array("q", [3, 4]), SAMPLING, parts.append)
        whole = await engine.generate(array("q", [3, 4]), SAMPLING)
        await engine.close()
        return parts, rest, whole

    parts, rest, whole = asyncio.run(run())
    assert len(parts) > 5 and all(part.versions == [[0, len(part.tokens)]] for part in parts)
    for name in ("tokens", "log_probs"):
        joined = [value for answer in (*parts, rest) for value in getattr(answer, name)]
        assert joined == getattr(whole, name).tolist()


def sampled(**settings: Any) -> Sampling:
    config = RolloutConfig(prompt_length=4, response_length=4)
    return Sampling.of(config, {"eos_token_id": [2, 9], "pad_token_id": 0, **settings})


def test_filters_are_passed_on_and_a_seed_only_if_requests_have_them() -> None:
    settings = sampled(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, response_length=3)
    without = sampling_parameters(settings, seeded=False)
    assert without == {
        "max_tokens": 3,
        "stop_token_ids": [2, 9],
        "repetition_penalty": 1.2,
        "temperature": 1.0,  # the logits are divided by 0.7 already
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
    }
    assert sampling_parameters(replace(settings, seed=17), seeded=True) == without | {"seed": 17}
    assert sampling_parameters(replace(settings, seed=-1), seeded=True) == without | {"seed": (1 << 63) - 1}


def test_greedy_decoding_has_neither_seeds_nor_filters() -> None:
    values = sampling_parameters(sampled(do_sample=False, top_p=0.5), seeded=True)
    assert values["temperature"] == 0.0 and not values.keys() & {"seed", "top_p", "top_k", "min_p"}
