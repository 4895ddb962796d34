"""The base of everything a client sends, and how a body is validated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from jaxserve.errors import RequestError
from jaxserve.server.schema.errors import request_error, shown


class Body(BaseModel):
    """Base of everything a client sends: strict types, finite numbers, null stands for the default."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


def object_of(body: object) -> dict[str, Any]:
    """`body`, which must be a JSON object."""
    if not isinstance(body, dict):
        raise RequestError(f"The request body must be a JSON object, not {shown(body)}.")
    return body


def validate[B: Body](
    model: type[B], fields: dict[str, Any], refused: Mapping[str, tuple[Any, ...]]
) -> B:
    """The request in `fields`; raises RequestError that names the field."""
    refuse(fields, refused)
    try:
        return model.model_validate(fields)
    except ValidationError as exc:
        raise request_error(exc.errors(include_url=False)[0]) from None


def refuse(fields: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]], path: str = "") -> None:
    """Raise RequestError for the first of the fields in `refused` that asks for something."""
    for name, neutral in refused.items():
        value = fields.get(name)
        if value is None or any(_same(value, other) for other in neutral):
            continue
        allowed = " or ".join(shown(other) for other in (*neutral, None))
        raise RequestError(
            f"'{path}{name}' is not supported by this server: got {shown(value)}; "
            f"leave it out or send {allowed}.",
            param=path + name,
            code="unsupported_parameter",
        )


def _same(value: object, other: object) -> bool:
    """Equality as JSON sees it: 1 is 1.0, but true is no number."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other
