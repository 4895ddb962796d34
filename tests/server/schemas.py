"""Hypothesis strategies of JSON values from a JSON Schema, valid ones and nearly valid ones."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

WORDS = st.sampled_from(
    ["", "x", "the answer", "é🙂", "a\n\nb", "<eos>", "user", "fake-model", "{", "\\", "[a-c]+"]
)
PLAIN = ("7", "0", "x", "get_x.1-a", "a" * 64)  # some of which match each pattern that a field may have
JUNK = st.recursive(
    st.none() | st.booleans() | st.sampled_from([0, -1, 1, 7, 2**70, -0.5, 1e300]) | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)


def values(schema: dict[str, Any], root: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that `schema`, whose references are into `root`, allows."""
    if "$ref" in schema:
        return values(root["components"]["schemas"][schema["$ref"].rpartition("/")[2]], root, depth)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return st.one_of([values(option, root, depth) for option in options])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return _numbers(schema, 1)
        case "number":
            return _numbers(schema, 0.25)
        case "string":
            return _strings(schema)
        case "array":
            least = schema.get("minItems", 0)
            items = values(schema.get("items", {}), root, depth + 1) if depth < 6 else st.nothing()
            return st.lists(items, min_size=least, max_size=least + (2 if depth < 6 else 0))
        case "object":
            return _objects(schema, root, depth)
    return JUNK


def _numbers(schema: dict[str, Any], step: float) -> st.SearchStrategy[Any]:
    low = schema.get("minimum", 0)
    if "exclusiveMinimum" in schema:
        low = schema["exclusiveMinimum"] + step
    high = schema.get("maximum", low + 300)
    if "exclusiveMaximum" in schema:
        high = schema["exclusiveMaximum"] - step
    edges = {low, high, *(v for v in (0, 1, 2, 5, low + step, high - step) if low <= v <= high)}
    return st.sampled_from(sorted(edges))


def _strings(schema: dict[str, Any]) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.sampled_from([text for text in PLAIN if re.fullmatch(schema["pattern"], text)])
    least, most = schema.get("minLength", 0), schema.get("maxLength", 10**9)
    return WORDS.map(lambda word: word.ljust(least, "x")[:most])


def _objects(schema: dict[str, Any], root: dict[str, Any], depth: int) -> st.SearchStrategy[dict[str, Any]]:
    properties = schema.get("properties", {})
    if not properties:
        patterns = schema.get("patternProperties")
        if patterns:
            [(pattern, inner)] = patterns.items()
            return st.dictionaries(_strings({"pattern": pattern}), values(inner, root, depth + 1), max_size=2)
        extra = schema.get("additionalProperties")
        inner = values(extra, root, depth + 1) if isinstance(extra, dict) else JUNK
        names = _strings(schema.get("propertyNames", {}))
        return st.dictionaries(names, inner, max_size=min(2, schema.get("maxProperties", 2)))
    required = schema.get("required", [])

    @st.composite
    def draw_object(draw: st.DrawFn) -> dict[str, Any]:
        optional = sorted(properties.keys() - set(required))
        most = 4 if depth < 6 else 0
        chosen = draw(st.lists(st.sampled_from(optional), max_size=most, unique=True)) if optional else []
        return {name: draw(values(properties[name], root, depth + 1)) for name in (*required, *chosen)}

    return draw_object()


@st.composite
def nearly(draw: st.DrawFn, schema: dict[str, Any], root: dict[str, Any]) -> Any:
    """A valid object with one property replaced, dropped or added; sometimes no object at all."""
    value = draw(values(schema, root))
    if not isinstance(value, dict) or draw(st.integers(0, 9)) == 0:
        return draw(JUNK)
    resolved = root["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    name = draw(st.sampled_from(sorted(resolved["properties"])))
    if draw(st.integers(0, 5)) == 0:
        value.pop(name, None)
    else:
        value[name] = draw(JUNK)
    return value
