"""The fields of a request for chat completions, as in OpenAI's API; ``chat_api`` answers them.

What a client sends is used as it is named, or rejected with the field and the status that OpenAI's API answers with.
Requests of the other APIs are translated into these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, LiteralString, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from mcontroller.config.checks import close_names
from trainer.rollout.server.request_error import reject

SAMPLING = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"}
"""Fields that change how a turn is sampled; the rollout checks their values."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts that a content in a list may have."""


def parsed(body: bytes) -> dict[str, Any]:
    """Return the object of a body.

    Raises:
        RequestError: it is not JSON in UTF-8, or no object.
    """
    try:
        fields = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        reject(f"the body is not JSON in UTF-8: {error}", code="invalid_json")
    if not isinstance(fields, dict):
        reject(f"the body is of type {type(fields).__name__}; expected a JSON object", code="invalid_json")
    return fields


def _joined(content: Any) -> Any:
    """Return the text of a content, which may be a list of parts."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") in TEXT_PARTS]
    if len(texts) < len(content) or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("text", "expected a text, or parts of type text")
    return "".join(map(str, texts))


def _wrong(field: str, text: LiteralString) -> PydanticCustomError:
    return PydanticCustomError("field", text, {"fields": [field]})


Name = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, BeforeValidator(_joined)]
Limit = Annotated[int, Field(ge=1)]
Stops = Annotated[
    list[Name], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop), Field(max_length=16)
]


class Fields(BaseModel):
    """An object of a request; null means that a field is left out.

    Attributes:
        ignored: fields that change nothing of a response.
        neutral: fields that are not supported, with the value that means the same as leaving them out.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    ignored: ClassVar[Sequence[str]] = ()
    neutral: ClassVar[Mapping[str, Any]] = {}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        given = {name: value for name, value in fields.items() if value is not None and name not in cls.ignored}
        return {name: value for name, value in given.items() if name not in cls.neutral or value != cls.neutral[name]}

    def plain(self) -> dict[str, Any]:
        """Return the fields that are set, for a chat template."""
        return self.model_dump(exclude_none=True)


class ApiRequest(Fields):
    """The fields that the requests of all APIs have."""

    model: Name = "policy"
    stream: bool = False
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    repetition_penalty: Any = None
    seed: Any = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """Return the request of an object of JSON.

        Raises:
            RequestError: a field is unknown or not supported, or a value has another type.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as invalid:
            error = invalid.errors(include_url=False)[0]
        place = [*error["loc"], *error.get("ctx", {}).get("fields", ())]
        param = "".join(f"[{at}]" if isinstance(at, int) else f".{at[:60]}" for at in place).removeprefix(".")
        shown = f"={repr(error['input'])[:60]}" if place == [*error["loc"]] and error["type"] != "missing" else ""
        if error["type"] == "extra_forbidden":
            known = close_names(param, cls.model_fields)
            reject(f"{param}{shown} is unknown or not supported{known}; leave it out", param=param)
        reject(f"{param}{shown}: {error['msg']}", param=param)


class Function(Fields):
    """A function that the policy may call."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool of a request."""

    type: Literal["function"]
    function: Function


class CalledFunction(Fields):
    """A function that the policy called."""

    name: str
    arguments: str


class ToolCall(Fields):
    """A call of the policy that a client sends back."""

    ignored = ("index",)
    id: Name
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Fields):
    """A message of a conversation."""

    ignored = ("annotations",)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    tool_call_id: Name | None = None
    tool_calls: list[ToolCall] | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.role != "assistant" and self.content is None:
            raise _wrong("content", "a message needs it, unless its role is assistant")
        if (self.role == "tool") != (self.tool_call_id is not None):
            raise _wrong("tool_call_id", "a message of role tool needs it, and no other")
        if self.role != "assistant" and self.tool_calls is not None:
            raise _wrong("tool_calls", "only messages of role assistant have them")
        return self

    def plain(self) -> dict[str, Any]:
        """Return the message for a chat template: models know no role ``developer``."""
        role = "system" if self.role == "developer" else self.role
        given = {name: value for name, value in super().plain().items() if value != []}
        return {**given, "role": role, "content": self.content}


class StreamOptions(Fields):
    """Options of a stream."""

    ignored = ("include_obfuscation",)
    include_usage: bool = False


class ChatRequest(ApiRequest):
    """A request for chat completions.

    Attributes:
        model: the name that the answer repeats: there is one policy.
        max_tokens: [tokens] the most of this turn; None: as many as there is room for.
        n: the number of choices.
        stop: texts that end a turn, and are left out of its text.
        logprobs: whether the answer has the log-probability of every token.
        stream: whether the answer is a stream of events.
    """

    ignored = (
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    )
    neutral: ClassVar[Mapping[str, Any]] = {
        "frequency_penalty": 0,
        "logit_bias": {},
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "response_format": {"type": "text"},
        "tool_choice": "auto",
        "top_logprobs": 0,
    }
    messages: Annotated[list[Message], Field(min_length=1)]
    tools: list[Tool] = []
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    stop: Stops = []
    logprobs: bool = False
    stream_options: StreamOptions = StreamOptions()

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise _wrong("max_tokens", "max_completion_tokens is the same limit; leave out one")
        if self.stream_options.include_usage and not self.stream:
            raise _wrong("stream_options", "they are for stream=true; leave them out")
        return self

    @cached_property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages, with contents that are texts."""
        return [message.plain() for message in self.messages]

    @cached_property
    def functions(self) -> list[dict[str, Any]]:
        """The tools, for a chat template."""
        return [tool.plain() for tool in self.tools]

    @property
    def settings(self) -> dict[str, Any]:
        """How the turn is sampled, for ``submit`` of the rollout."""
        limit = self.max_tokens or self.max_completion_tokens
        return {**self.model_dump(include=SAMPLING, exclude_none=True), "max_tokens": limit}
