"""Errors as the API has them: a status, and a body `{"error": {"message", "type", "param", "code"}}`."""

from typing import Any

KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a request is answered with where it cannot be fulfilled.

    Args:
        status: Of HTTP.
        message: One sentence that names the value and the way out.
        param: The field of the request that is at fault.
        code: A word for programs.
        headers: Of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """What is sent."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        said = str(self).encode("utf-8", "replace").decode()  # half a surrogate pair cannot be sent
        return {"error": {"message": said, "type": kind, "param": self.param, "code": self.code}}
