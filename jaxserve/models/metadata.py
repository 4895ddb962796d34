"""Reading a file's own description of a model, key by key, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, cast

from jaxserve.errors import WeightsError


def refuse(key: str, value: object, supported: str) -> NoReturn:
    """Raise for a model option that would change the answer and isn't implemented."""
    raise WeightsError(f"{key} = {value!r} is not supported; supported: {supported}")


class Metadata:
    """Typed access to GGUF key-value pairs or to config.json."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def need(self, key: str, kind: type) -> Any:
        """The value of `key`; WeightsError if it is missing, of another type, or a number not above 0."""
        if self._values.get(key) is None:
            raise WeightsError(f"the model's description lacks {key}")
        return self.get(key, kind, 1 if kind in (int, float) else None)

    def get(self, key: str, kind: type, default: Any) -> Any:
        """The value of `key`, or `default` where it is missing or null.

        Where the default is a number above 0 the value must be one too.
        """
        value = self._values.get(key)
        if value is None:
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if kind is list and isinstance(value, Sequence) and not isinstance(value, str | bytes):
            return value
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise WeightsError(f"{key} = {value!r}: expected {kind.__name__}, found {type(value).__name__}")
        if kind in (int, float) and default is not None and default > 0 and not cast(float, value) > 0:
            raise WeightsError(f"{key} = {value!r}: expected a number above 0")
        return value
