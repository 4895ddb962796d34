"""From the fields that say what an answer must look like to a grammar."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxserve.errors import RequestError
from jaxserve.grammar import spec as specs
from jaxserve.grammar.spec import GrammarSpec
from jaxserve.server.schema.structured import StructuredBody


def answer_spec(fields: StructuredBody) -> GrammarSpec | None:
    """What the request asks for, None for free text. Raises RequestError."""
    asked: list[tuple[str, Callable[[str], GrammarSpec]]] = []
    formats = fields.response_format
    if formats is not None and formats.type == "json_object":
        asked.append(("response_format", specs.json_object))
    elif formats is not None and formats.type == "json_schema":
        asked.append(("response_format.json_schema", partial(_format_spec, fields)))
    outputs, prefix = fields.structured_outputs, "structured_outputs."
    if outputs is not None:
        asked += _constraints(prefix, outputs.json_, outputs.regex, outputs.choice, outputs.grammar)
        if outputs.json_object:
            asked.append(("structured_outputs.json_object", specs.json_object))
    asked += _constraints(
        "guided_", fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar
    )
    if not asked:
        return None
    if len(asked) > 1:
        first, second = asked[0][0], asked[1][0]
        raise RequestError(
            f"'{first}' and '{second}' both say what the answer must look like; leave one of them out.",
            param=second,
        )
    [(param, make)] = asked
    if getattr(fields, "allowed_token_ids", None) is not None:
        raise RequestError(
            f"'allowed_token_ids' and '{param}' can't be combined: the tokens that the answer must be made "
            "of may not be among the allowed ones. Leave one of them out.",
            param="allowed_token_ids",
        )
    return make(param)


def _format_spec(fields: StructuredBody, param: str) -> GrammarSpec:
    assert fields.response_format is not None
    wrapped = fields.response_format.json_schema
    if wrapped is None:
        raise RequestError(f"'{param}' is required with the type \"json_schema\".", param=param)
    if wrapped.schema_ is None:
        return specs.json_object(param)
    return specs.json_schema(wrapped.schema_, f"{param}.schema")


def _constraints(
    prefix: str, json: object, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[tuple[str, Callable[[str], GrammarSpec]]]:
    asked: list[tuple[str, Callable[[str], GrammarSpec]]] = []
    if json is not None:
        asked.append((f"{prefix}json", partial(specs.json_schema, json)))
    if regex is not None:
        asked.append((f"{prefix}regex", partial(specs.regex, regex)))
    if choice is not None:
        asked.append((f"{prefix}choice", partial(specs.choice, choice)))
    if grammar is not None:
        asked.append((f"{prefix}grammar", partial(specs.grammar, grammar)))
    return asked
