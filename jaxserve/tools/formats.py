"""How models write tool calls, and the grammars that make them write nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.grammar.spec import ANY_TEXT, GrammarSpec, Part, quote, schema_text
from jaxserve.tools import reasoning
from jaxserve.tools.parsers import CallParser, HermesParser, JsonParser, Llama3Parser, MistralParser

# Texts of special tokens that matter, and their ids; where a text is an ordinary one it isn't in it.
SpecialIds = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Function:
    """One that the request offers. `parameters` is a JSON Schema; None: it takes none."""

    name: str
    parameters: dict[str, Any] | None = None
    strict: bool = False  # a call must follow `parameters`, also where the model is free to call


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """`markers` are texts that the parser has to see; in some vocabularies they are special tokens."""

    name: str
    parser: type[CallParser]
    markers: tuple[str, ...] = ()
    arguments_key: str = "arguments"


FORMATS = {
    one.name: one
    for one in (
        ToolFormat("hermes", HermesParser, ("<tool_call>", "</tool_call>")),
        ToolFormat("llama3_json", Llama3Parser, ("<|python_tag|>",), "parameters"),
        ToolFormat("mistral", MistralParser, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
        ToolFormat("json", JsonParser),
    )
}


def choose_format(name: str, template: str | None) -> ToolFormat | None:
    """The format called `name`; for "auto" the one that the chat template speaks of, None if it isn't known.

    A template that knows nothing of tools is given ours, which is "hermes". Raises ConfigError.
    """
    if name != "auto":
        if name not in FORMATS:
            raise ConfigError(f"tool_call_parser={name!r} must be one of auto, {', '.join(FORMATS)}")
        return FORMATS[name]
    if template is None or "tools" not in template:
        return FORMATS["hermes"]
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<function=" in template:
        return None  # calls in XML
    if "<tool_call>" in template:
        return FORMATS["hermes"]
    if "<|python_tag|>" in template or '"parameters"' in template:
        return FORMATS["llama3_json"]
    return FORMATS["json"]


def forced_calls(
    kind: ToolFormat, functions: Sequence[Function], special: SpecialIds, *, single: bool, param: str
) -> GrammarSpec:
    """Nothing but calls of `functions`, at least one; exactly one if `single`."""
    rules = _call_rules(kind, functions, special, single=single)
    return _spec([f"start: {rules.pop(0)}", *rules], functions, param)


def free_or_calls(
    kind: ToolFormat, functions: Sequence[Function], special: SpecialIds, *, single: bool, param: str
) -> GrammarSpec:
    """Any text, with calls as the functions' schemas say; of those not `strict`, arguments are any object."""
    loose = [one if one.strict else Function(one.name, {"type": "object"}) for one in functions]
    if kind.parser is HermesParser or kind.parser is MistralParser:
        marker = kind.markers[0]
        if marker in special:
            head = f"marked: TEXT <[{special[marker]}]>"
        else:
            head = f"marked[lazy]: TEXT {quote(marker)}"
        call = f"call: marked {_behind_marker(kind, special, single=single)}"
        most = "?" if single or not _repeats(kind, special) else "*"
        rules = [f"start: call{most} TEXT", f"TEXT: {ANY_TEXT}", head, call, _bodies(kind, loose, special)]
    else:
        calls, *rules = _call_rules(kind, loose, special, single=single)
        # A text that begins as a call does is one.
        rules = [f"start: {calls} | TEXT", r"TEXT: /(\s*[^{\[\s](.|\n)*)?/", *rules]
    return _spec(rules, loose, param)


def content_or_calls(content: GrammarSpec, calls: GrammarSpec) -> GrammarSpec:
    """Either as a whole."""
    main: Part = ("main", "lark_grammar", "start: @content | @calls")
    return GrammarSpec((main, *content.renamed("content"), *calls.renamed("calls")), content.param)


def after_reasoning(answer: GrammarSpec, special: SpecialIds, *, is_open: bool) -> GrammarSpec:
    """`answer` behind reasoning, which the prompt has begun if `is_open`, and which may be missing if not."""
    close = reasoning.CLOSE
    if close in special:
        thought = f"thought: {ANY_TEXT} <[{special[close]}]>"
    else:
        thought = f"thought[lazy]: {ANY_TEXT} {quote(close)}"
    begun = "" if is_open else _literal(reasoning.OPEN, special)
    whole = f"({begun} thought BLANKS)" + ("" if is_open else "?")
    rules = [f"start: {whole} @answer", thought, r"BLANKS: /[ \n]{0,4}/"]
    return GrammarSpec((("main", "lark_grammar", "\n".join(rules)), *answer.renamed("answer")), answer.param)


def _spec(rules: list[str], functions: Sequence[Function], param: str) -> GrammarSpec:
    parts: list[Part] = [("main", "lark_grammar", "\n".join(rules))]
    for i, one in enumerate(functions):
        none: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
        schema = none if one.parameters is None else one.parameters
        parts.append((f"arguments_{i}", "json_schema", schema_text(schema, param)))
    return GrammarSpec(tuple(parts), param)


def _call_rules(
    kind: ToolFormat, functions: Sequence[Function], special: SpecialIds, *, single: bool
) -> list[str]:
    """First the expression for all calls of an answer, then the rules it needs."""
    bodies = _bodies(kind, functions, special)
    if kind.parser is HermesParser or kind.parser is MistralParser:
        marker = _literal(kind.markers[0], special)
        call = f"call: {marker} {_behind_marker(kind, special, single=single)}"
        if single or not _repeats(kind, special):
            return ["call", call, bodies]
        return ['call ("\\n" call)*' if kind.parser is HermesParser else "call+", call, bodies]
    if single:
        return ["body", bodies]
    if kind.parser is Llama3Parser:
        return ['body ("; " body)*', bodies]
    return ['"[" body (", " body)* "]"', bodies]


def _repeats(kind: ToolFormat, special: SpecialIds) -> bool:
    """Whether each of several calls has its own marker; older models of Mistral write a list behind one."""
    return kind.parser is HermesParser or "[ARGS]" in special


def _behind_marker(kind: ToolFormat, special: SpecialIds, *, single: bool) -> str:
    if kind.parser is HermesParser:
        return f'"\\n" body "\\n" {_literal("</tool_call>", special)}'
    if "[ARGS]" in special:
        return "body"
    return '"[" body "]"' if single else '"[" body (", " body)* "]"'


def _bodies(kind: ToolFormat, functions: Sequence[Function], special: SpecialIds) -> str:
    """The rule of one call, without what marks it."""
    options = []
    for i, one in enumerate(functions):
        if kind.parser is MistralParser and "[ARGS]" in special:
            options.append(f"{quote(one.name)} {_literal('[ARGS]', special)} @arguments_{i}")
        else:
            head = f'{{"name": {json.dumps(one.name)}, "{kind.arguments_key}": '
            options.append(f'{quote(head)} @arguments_{i} "}}"')
    return "body: " + " | ".join(options)


def _literal(marker: str, special: SpecialIds) -> str:
    return f"<[{special[marker]}]>" if marker in special else quote(marker)
