"""Text to ids and back, and what the tokenizer is: /tokenize, /detokenize, /tokenizer_info."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from jaxserve.server.prompts import chat_prompt, check_id, completion_prompts
from jaxserve.server.reading import understand
from jaxserve.server.schema.chat import validate_chat
from jaxserve.server.schema.completion import validate_completion
from jaxserve.server.schema.tokens import CHAT_FIELDS, validate_detokenize, validate_tokenize
from jaxserve.server.served import ServedModel
from jaxserve.server.state import STATE
from jaxserve.server.tooling import offer_of, template_tools


async def tokenize(request: web.Request) -> web.Response:
    """{count, max_model_len, tokens, token_strs}: exactly the ids that the model would be given."""
    model = request.app[STATE].loaded().model
    return web.json_response(await understand(request, lambda body: tokenized(body, model)))


async def detokenize(request: web.Request) -> web.Response:
    """{prompt}: the text of ids, special tokens included."""
    model = request.app[STATE].loaded().model
    return web.json_response(await understand(request, lambda body: detokenized(body, model)))


async def tokenizer_info(request: web.Request) -> web.Response:
    model = request.app[STATE].loaded().model
    tokenizer = model.tokenizer

    def spelled(token_id: int | None) -> str | None:
        return None if token_id is None else tokenizer.token_text(token_id)

    return web.json_response({
        "tokenizer_class": type(tokenizer).__name__,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": spelled(tokenizer.bos_id),
        "eos_token": spelled(tokenizer.eos_id),
        "add_bos_token": tokenizer.add_bos,
        "model_max_length": model.max_model_len,
        "chat_template": None if model.chat_template is None else model.chat_template.source,
        "chat_template_names": [] if model.chat_template is None else list(model.chat_template.named),
    })


def tokenized(body: object, model: ServedModel) -> dict[str, Any]:
    """The answer to a body of /tokenize. Raises RequestError."""
    fields = validate_tokenize(body)
    model.resolve(fields.model)
    common: dict[str, Any] = {"add_special_tokens": fields.add_special_tokens}
    if fields.prompt is None:
        assert isinstance(body, dict)
        same = {name: body[name] for name in ("messages", *CHAT_FIELDS) if name in body}
        chat = validate_chat(common | same)
        tools = template_tools(chat, offer_of(chat, model.speech_for(chat)))
        ids = chat_prompt(chat, model, model.max_model_len, tools).ids
    elif fields.prompt:
        completion = validate_completion(common | {"prompt": fields.prompt})
        ids = completion_prompts(completion, model, model.max_model_len)[0].ids
    else:
        bos = model.tokenizer.bos_id
        adds = fields.add_special_tokens and model.tokenizer.add_bos and bos is not None
        ids = (bos,) if adds and bos is not None else ()
    spell = model.tokenizer.token_text
    return {
        "count": len(ids),
        "max_model_len": model.max_model_len,
        "tokens": ids,
        "token_strs": [spell(token_id) for token_id in ids] if fields.return_token_strs else None,
    }


def detokenized(body: object, model: ServedModel) -> dict[str, Any]:
    """The answer to a body of /detokenize. Raises RequestError."""
    fields = validate_detokenize(body)
    model.resolve(fields.model)
    for i, token_id in enumerate(fields.tokens):
        check_id(token_id, f"tokens[{i}]", model)
    return {"prompt": model.tokenizer.decode(fields.tokens, skip_special=False)}
