"""Fields that say what an answer must look like."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from jaxserve.server.schema.body import Body


class JsonSchemaFormat(Body):
    """OpenAI's wrapping of a schema. The answer follows it whether `strict` is set or not."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None  # absent: any JSON object
    strict: bool = False


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Body):
    """vLLM's field: one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: Annotated[Any, Field(alias="json")] = None  # a JSON Schema, or its text
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # in Lark's notation, or in llama.cpp's (GBNF)


class StructuredBody(Body):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # The same under vLLM's older names.
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
