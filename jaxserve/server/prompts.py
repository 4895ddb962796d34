"""From what a client sends as prompt or messages to the token ids that the model continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ContextLengthError, RequestError, TokenizerError
from jaxserve.server.schema import ChatBody, CompletionBody, GenerationBody, Message, shown
from jaxserve.server.served import ServedModel
from jaxserve.tokenizer.chat import encode_chat
from jaxserve.tokenizer.infill import Infill
from jaxserve.tools.formats import ToolFormat
from jaxserve.tools.prompting import template_call, template_id, without_tools


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what `echo` gives back: the client's own text, or what its ids stand for."""

    ids: tuple[int, ...]
    text: str = ""


def completion_prompts(fields: CompletionBody, model: ServedModel, room: int) -> list[Prompt]:
    """The prompts of a completion request; -1 as `truncate_prompt_tokens` cuts to `room` tokens."""
    infill = _infill(fields, model) if fields.suffix else None
    return [_completion_prompt(prompt, fields, model, infill, room) for prompt in fields.prompt]


def chat_prompt(
    fields: ChatBody, model: ServedModel, room: int, tools: Sequence[dict[str, Any]] = ()
) -> Prompt:
    """The messages through the chat template; -1 as `truncate_prompt_tokens` cuts to `room` tokens.

    A template that doesn't know tools gets `tools` and their results as plain text.
    """
    if fields.truncate_prompt_tokens is None:
        check_text_fits([message.content for message in fields.messages], "messages", model)
    if fields.continue_final_message:
        _check_continuable(fields)
    template = model.template_for(fields)
    if template is not None:
        _check_variables(fields.chat_template_kwargs, template.variables)
    bos = model.tokenizer.bos_id
    messages = _template_messages(fields.messages, model.speech_for(fields).tool_format)
    variables = dict(fields.chat_template_kwargs)
    if template is not None and not template.takes_tools:
        if tools or any(message.tool_calls or message.role == "tool" for message in fields.messages):
            messages = without_tools(messages, tools)
    elif tools:
        variables["tools"] = list(tools)
    try:
        ids = encode_chat(
            model.tokenizer,
            template,
            messages,
            add_generation_prompt=fields.add_generation_prompt and not fields.continue_final_message,
            continue_final_message=fields.continue_final_message,
            add_bos=fields.add_special_tokens,
            **variables,
        )
    except TokenizerError as exc:  # the template's own raise_exception, for roles it does not take
        raise RequestError(
            f"'messages' can't be rendered by the chat template: {exc}", param="messages"
        ) from exc
    keep_bos = fields.add_special_tokens and model.tokenizer.add_bos and ids[:1] == [bos]
    return Prompt(tuple(_truncate(ids, fields, model, room, keep_bos=keep_bos)))


def _completion_prompt(
    prompt: str | list[int], fields: CompletionBody, model: ServedModel, infill: Infill | None, room: int
) -> Prompt:
    if not prompt:
        raise RequestError("'prompt' must not be empty: send some text or token ids.", param="prompt")
    tokenizer, bos = model.tokenizer, model.tokenizer.bos_id
    if isinstance(prompt, list):
        for token_id in prompt:
            check_id(token_id, "prompt", model)
        ids, keep_bos = prompt, False
    else:
        if fields.truncate_prompt_tokens is None:
            check_text_fits([prompt], "prompt", model)
        ids = tokenizer.encode(prompt)
        keep_bos = fields.add_special_tokens and tokenizer.add_bos and bos is not None
    if infill is not None:
        assert fields.suffix is not None
        check_text_fits([fields.suffix], "suffix", model)
        ids = infill.wrap(ids, tokenizer.encode(fields.suffix))
    if keep_bos and ids[:1] != [bos]:  # the text may already spell it
        assert bos is not None
        ids = [bos, *ids]
    kept = _truncate(ids, fields, model, room, keep_bos=keep_bos)
    if not fields.echo:
        return Prompt(tuple(kept))
    if isinstance(prompt, str) and len(kept) == len(ids):
        return Prompt(tuple(kept), prompt)
    return Prompt(tuple(kept), tokenizer.decode(kept, skip_special=fields.skip_special_tokens))


def _truncate(
    ids: list[int], fields: GenerationBody, model: ServedModel, room: int, *, keep_bos: bool
) -> list[int]:
    """The last `truncate_prompt_tokens` ids; a BOS that was put before them stays the first."""
    keep = fields.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep == 0 or keep > model.max_model_len:
        raise RequestError(
            f"'truncate_prompt_tokens' must be -1 (as many as fit) or from 1 to this model's maximum context "
            f"length of {model.max_model_len} tokens, got {keep}.",
            param="truncate_prompt_tokens",
        )
    keep = room if keep == -1 else keep
    if len(ids) <= keep:
        return ids
    if keep_bos and keep > 1:
        return [ids[0], *ids[len(ids) - keep + 1 :]]
    return ids[len(ids) - keep :]


def _infill(fields: CompletionBody, model: ServedModel) -> Infill:
    if model.infill is None:
        raise RequestError(
            f"'suffix' needs a model with fill-in-the-middle tokens, and '{model.name}' has none; leave it "
            "out, or serve a model that was trained to fill in.",
            param="suffix",
            code="unsupported_parameter",
        )
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(fields, name):
            raise RequestError(
                f"'suffix' and '{name}' can't be combined: the suffix stands inside of the prompt. "
                "Leave one of them out.",
                param=name,
            )
    return model.infill


def _template_messages(messages: list[Message], kind: ToolFormat | None) -> list[dict[str, Any]]:
    dicts: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        _check_roles(message, i)
        # "developer" is OpenAI's newer name of "system"; templates know the older one.
        role = "system" if message.role == "developer" else message.role
        dicts.append({"role": role, "content": message.content})
        if message.name is not None:
            dicts[-1]["name"] = message.name
        if message.reasoning_content is not None:
            dicts[-1]["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            dicts[-1]["tool_calls"] = [
                template_call(call.id, call.function.name, call.function.arguments, kind)
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            dicts[-1]["tool_call_id"] = template_id(message.tool_call_id, kind)
    return dicts


def _check_roles(message: Message, i: int) -> None:
    """A field of the wrong role would be dropped silently by most templates."""
    if message.role == "tool" and message.tool_call_id is None:
        raise RequestError(
            f"'messages[{i}].tool_call_id' is required with the role \"tool\": it says which call this is "
            "the result of.",
            param=f"messages[{i}].tool_call_id",
            code="missing_required_parameter",
        )
    for name in ("tool_calls", "reasoning_content", "tool_call_id"):
        role = "tool" if name == "tool_call_id" else "assistant"
        if getattr(message, name) and message.role != role:
            raise RequestError(
                f"'messages[{i}].{name}' belongs to the role {shown(role)}, but the message is by "
                f"{shown(message.role)}; leave it out.",
                param=f"messages[{i}].{name}",
            )


def _check_continuable(fields: ChatBody) -> None:
    if "add_generation_prompt" in fields.model_fields_set and fields.add_generation_prompt:
        raise RequestError(
            "'continue_final_message' and 'add_generation_prompt' can't both be true: the answer either goes "
            "on with the final message or begins a new one.",
            param="continue_final_message",
        )
    last = fields.messages[-1]
    if last.role != "assistant" or not last.content:
        what = f"is by {shown(last.role)}" if last.role != "assistant" else "has no text"
        raise RequestError(
            f"'continue_final_message' goes on with a final message of the role \"assistant\", but the final "
            f"message {what}; add the beginning of the answer as the final message.",
            param="continue_final_message",
        )


def _check_variables(variables: dict[str, Any], known: frozenset[str]) -> None:
    """A variable that the template never reads would be accepted and ignored."""
    for name in variables:
        if name not in known:
            listed = ", ".join(sorted(known)) or "none"
            raise RequestError(
                f"'chat_template_kwargs' has {shown(name)}, which this model's chat template does not use or "
                f"which is not the client's to set; variables that can be set: {listed[:300]}.",
                param="chat_template_kwargs",
            )


def check_id(token_id: int, param: str, model: ServedModel) -> None:
    """Raise RequestError for an id outside of the vocabulary."""
    if not 0 <= token_id < model.vocab_size:
        raise RequestError(
            f"'{param}' has the token id {shown(token_id)}, outside of the vocabulary "
            f"[0, {model.vocab_size}).",
            param=param,
        )


def check_text_fits(texts: list[str], param: str, model: ServedModel) -> None:
    """Refuse what can't fit, however it is split, before seconds are spent on splitting it."""
    if sum(map(len, texts)) <= 8 * model.max_model_len:
        return
    at_least = sum(len(text.encode()) for text in texts) // model.max_token_bytes
    if at_least >= model.max_model_len:
        raise _too_long(model, f"at least {at_least}", param)


def max_tokens(
    model: ServedModel, prompt_len: int, asked: int | None, default: int, prompt: str, param: str
) -> int:
    """How many tokens to generate: what was asked if it fits, else what is left of the default."""
    left = model.max_model_len - prompt_len
    if prompt_len == 0:
        raise RequestError(f"'{prompt}' must not be empty: it has no tokens.", param=prompt)
    if left < (asked != 0):
        raise _too_long(model, str(prompt_len), prompt)
    if asked is None:
        return min(default, left)
    if asked > left:
        raise ContextLengthError(
            f"This model's maximum context length is {model.max_model_len} tokens. However, you requested "
            f"{prompt_len + asked} tokens ({prompt_len} in '{prompt}', {asked} in '{param}'). "
            f"Shorten '{prompt}', or set '{param}' to {left} or less.",
            param=param,
            code="context_length_exceeded",
        )
    return asked


def _too_long(model: ServedModel, prompt_len: str, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {model.max_model_len} tokens. However, '{param}' has "
        f"{prompt_len} tokens, and an answer needs room for one more. Shorten '{param}'.",
        param=param,
        code="context_length_exceeded",
    )
