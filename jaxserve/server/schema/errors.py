"""What is wrong with a body, in our words: field, value, limit."""

from __future__ import annotations

import json

from pydantic_core import ErrorDetails, PydanticCustomError

from jaxserve.errors import RequestError


def invalid(text: str) -> PydanticCustomError:
    """An error whose text is ours; the template keeps braces in it from being read as fields."""
    return PydanticCustomError("invalid", "{text}", {"text": text})


_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def request_error(error: ErrorDetails) -> RequestError:
    """One pydantic error in our words: field, value, limit."""
    kind, ctx = error["type"], error.get("ctx", {})
    path = _path(error["loc"])
    param = path or None
    value = shown(error.get("input"))
    if kind == "missing":
        return RequestError(f"'{path}' is required.", param=param, code="missing_required_parameter")
    if kind == "invalid":
        text = f"'{path}' {ctx['text']}" if ctx["text"].startswith(("has", "must")) else (
            f"'{path}': {ctx['text']}, got {value}"
        )
    elif kind in _EXPECTED:
        text = f"'{path}' must be {_EXPECTED[kind]}, got {value}"
    elif kind in _LIMITS:
        name, words = _LIMITS[kind]
        limit = ctx[name]
        limit = int(limit) if float(limit).is_integer() else limit
        text = f"'{path}' must be {words} {limit}, got {value}"
    elif kind == "literal_error":
        text = f"'{path}' must be {ctx['expected']}, got {value}"
    elif kind in ("string_too_short", "string_too_long"):
        bound = f"at least {ctx['min_length']}" if "min_length" in ctx else f"at most {ctx['max_length']}"
        text = f"'{path}' must have {bound} characters, got {value}"
    elif kind == "string_pattern_mismatch":
        text = f"'{path}' must match {ctx['pattern']}, got {value}"
    elif kind in ("too_short", "too_long"):
        bound = f"at least {ctx['min_length']}" if kind == "too_short" else f"at most {ctx['max_length']}"
        text = f"'{path}' must have {bound} items, got {len(error['input'])}"
    else:
        text = f"'{path}': {error['msg']}, got {value}"
    return RequestError(text + ".", param=param, code="invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") as messages[0].role."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def shown(value: object, limit: int = 80) -> str:
    """A value as JSON for an error text, cut to `limit` characters."""
    if isinstance(value, str):
        value = value[: limit + 1]
    elif isinstance(value, list | dict) and len(value) > limit:
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)} items"
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"
