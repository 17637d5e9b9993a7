"""Environments of the package verifiers (0.3), whose rollouts are episodes, and whose rubrics score them.

The environment is a client of a ``ChatServer``; its messages, tools, stop conditions and rubric are used as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mcontroller.config.imports import import_extra
from mcontroller.errors import DataError
from trainer.rollout.server.chat_server import AgentEpisode


class VerifiersEpisode(AgentEpisode):
    """An episode in an environment of verifiers: a class for ``multi_turn.episode``.

    The problems are rows of its data set: ``source: verifiers``. The score of a response is its reward, and the metrics
    are those of the rubric.

    Args:
        environment: the name of an installed environment, or of a module with ``load_environment``.
        arguments: of its ``load_environment``.
        tool_calls, vllm_python: see ``AgentEpisode``.
        sampling: the fields that the requests have, such as ``max_tokens``.

    Raises:
        ConfigError: the extra ``verifiers`` is not installed.
    """

    def __init__(
        self,
        environment: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        tool_calls: str = "hermes",
        vllm_python: str | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(self._play, tool_calls=tool_calls, vllm_python=vllm_python)
        verifiers = import_extra("verifiers", "verifiers", "multi_turn.episode")
        self._environment = verifiers.load_environment(environment, **(arguments or {}))
        self._client, self._sampling = verifiers.OpenAIChatCompletionsClient, dict(sampling or {})

    async def _play(self, base_url: str, api_key: str, problem: Mapping[str, Any]) -> dict[str, float]:
        """Return the reward and the metrics of a rollout.

        Raises:
            DataError: the rollout failed, for the reason that the environment reports.
        """
        import openai

        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
            made = await self._environment.run_rollout(
                problem["record"], self._client(client), "policy", dict(self._sampling)
            )
        if made.get("error") is not None:
            raise DataError(f"the environment failed: {made['error']}", error=made["error"])
        return {**made["metrics"], "score": made["reward"]}
