"""Typed errors. A client's mistake carries the field, what came and what is possible."""

from __future__ import annotations


class JaxserveError(Exception):
    """Base of every error that jaxserve raises on purpose. Its text is fit to show to a user."""


class RequestError(JaxserveError):
    """A request that can't be served as it is: HTTP 4xx, never the process.

    `param` names the offending field, `code` is a machine-readable reason, `status` the HTTP status.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt, or prompt plus requested tokens, does not fit into the model's context."""


class ModelNotFoundError(RequestError):
    """The request names a model that this server does not serve."""

    status = 404


class QueueFullError(RequestError):
    """The bounded queue is full. HTTP 429; `retry_after_s` tells when to come back."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, code: str = "queue_full", retry_after_s: int = 1):
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class UnavailableError(RequestError):
    """The engine is starting, draining or dead. HTTP 503."""

    status = 503
    type = "service_unavailable"

    def __init__(self, message: str, *, retry_after_s: int = 5):
        super().__init__(message, code="unavailable")
        self.retry_after_s = retry_after_s


class EngineDiedError(JaxserveError):
    """The engine could not go on, so neither can the server; a supervisor should start it again."""


class ConfigError(JaxserveError):
    """A flag or configuration key that is unknown, contradictory or can't be met."""


class WeightsError(JaxserveError):
    """A model file that is missing, corrupt, truncated, unsupported or of the wrong shape."""


class TokenizerError(JaxserveError):
    """Tokenizer data or a chat template that is missing, corrupt or can't be applied."""


class GrammarError(JaxserveError):
    """A grammar that can't be compiled, or an answer that can't go on by its grammar."""


class GrammarLimitError(GrammarError):
    """An answer whose grammar takes more work than it may. Its text is for the client."""


class OutOfPages(JaxserveError):
    """The KV page pool holds fewer free pages than were asked for."""
