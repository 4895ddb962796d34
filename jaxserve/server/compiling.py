"""Compiling a request's grammar while the event loop goes on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from jaxserve.errors import ConfigError, GrammarError, RequestError, UnavailableError
from jaxserve.grammar.compiler import refusal
from jaxserve.server.openai import Generation
from jaxserve.server.served import ServedModel

COMPILE_TIMEOUT_S = 30.0  # the wait for its turn and, with the first grammar, for the vocabulary included


async def with_grammar(generation: Generation, model: ServedModel) -> Generation:
    """The same, its requests carrying the compiled grammar. Raises RequestError, which quotes the reason, and
    UnavailableError when it takes too long.

    Compiling goes on in a thread of its own; the event loop is free meanwhile.
    """
    spec = generation.grammar
    if spec is None:
        return generation
    made = asyncio.wrap_future(model.grammars.submit(spec))
    try:
        # Other requests may wait for the same grammar: a timeout here must not cancel it.
        grammar = await asyncio.wait_for(asyncio.shield(made), COMPILE_TIMEOUT_S)
    except TimeoutError:
        made.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise UnavailableError(
            f"'{spec.param}' was not compiled within {COMPILE_TIMEOUT_S:g} seconds, for the server is busy "
            "with other grammars; try again later."
        ) from None
    except GrammarError as error:
        raise refusal(error, spec.param) from None
    except ConfigError as error:
        raise RequestError(f"'{spec.param}' can't be honoured: {error}", param=spec.param) from None
    return replace(
        generation, requests=tuple(replace(request, grammar=grammar) for request in generation.requests)
    )
