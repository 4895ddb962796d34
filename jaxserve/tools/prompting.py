"""Tools and calls as a chat template is given them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from jaxserve.tools.formats import ToolFormat

MISTRAL_ID_CHARS = 9  # what Mistral's templates insist on


def template_call(call_id: str, name: str, arguments: str, kind: ToolFormat | None) -> dict[str, Any]:
    """A call of an earlier answer. Templates want its arguments as an object, OpenAI's API as text."""
    try:
        value = json.loads(arguments)
    except ValueError:
        value = arguments
    function = {"name": name, "arguments": value if isinstance(value, dict) else arguments}
    return {"id": template_id(call_id, kind), "type": "function", "function": function}


def template_id(call_id: str, kind: ToolFormat | None) -> str:
    """The id as the template takes it."""
    is_fit = len(call_id) == MISTRAL_ID_CHARS and call_id.isalnum()
    if kind is None or kind.name != "mistral" or is_fit:
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:MISTRAL_ID_CHARS]


def without_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages for a template that knows neither tools nor their results: both told in plain text.

    The tools are listed at the end of the system message, calls stand between <tool_call> tags in the
    assistant's, and results between <tool_response> tags in the user's.
    """
    told: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            content = f"<tool_response>\n{content}\n</tool_response>"
            if told and told[-1]["role"] == "user" and told[-1].get("results"):
                told[-1]["content"] += "\n" + content
            else:
                told.append({"role": "user", "content": content, "results": True})
            continue
        for call in message.get("tool_calls") or ():
            text = json.dumps(call["function"], ensure_ascii=False)
            content += ("\n" if content else "") + f"<tool_call>\n{text}\n</tool_call>"
        kept = {key: value for key, value in message.items() if key != "tool_calls"}
        told.append({**kept, "content": content})
    if tools:
        listing = _listing(tools)
        if told and told[0]["role"] == "system":
            told[0]["content"] += "\n\n" + listing
        else:
            told.insert(0, {"role": "system", "content": listing})
    return [{key: value for key, value in message.items() if key != "results"} for message in told]


def _listing(tools: Sequence[dict[str, Any]]) -> str:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions, one JSON description a line:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "To call one, write its name and its arguments as JSON, and nothing else, like this:\n"
        '<tool_call>\n{"name": "the function", "arguments": {"the parameter": "its value"}}\n</tool_call>\n'
        "The result comes in the next message. Answer in plain text when you need no function."
    )
