"""The error of a request, as OpenAI's API answers it."""

from __future__ import annotations

from typing import Any, NoReturn

from mcontroller.errors import DataError


class RequestError(DataError):
    """A request that is answered with an error of OpenAI's API.

    Attributes:
        status: of HTTP.
        code: the error for programs, such as ``invalid_api_key``; None: there is no name for it.
        param: the field of the request; None: the request as a whole.
    """

    status: int
    code: str | None
    param: str | None

    def body(self) -> dict[str, Any]:
        """Return the body of the answer, which clients of Anthropic's API can read as well."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def reject(message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> NoReturn:
    """Raise a ``RequestError``."""
    raise RequestError(message, status=status, code=code, param=param)
