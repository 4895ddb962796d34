#!/usr/bin/env python3
"""What smaller weights, or a smaller KV cache, change in a model's answers.

    .venv/bin/python scripts/quality.py smollm2-135m gemma3-270m

The text is read once with float32 weights, activations and cache, and once in each other form, all from the
same model file: in chunks, as a server prefills. Told are the perplexity, at how many places the likeliest
next token is the same as in float32 ("top-1"), and how far the log-probability of the text's own next token
is off.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.engine.config import EngineConfig
from jaxserve.models.decoder import Batch, abstract_decoder
from jaxserve.ops.backend import choose
from jaxserve.runtime.runner import prepare_params
from jaxserve.runtime.state import kv_shapes, zeros
from jaxserve.weights.model_files import open_model

TEXT = Path(__file__).parents[1] / "tests/data/text/english_and_code.txt"
CHUNK = 256
FORMS = {  # dtype, quantization, KV dtype
    "float32": ("float32", None, "float32"),
    "bfloat16": ("bfloat16", None, "bfloat16"),
    "int8, groups of 32": ("bfloat16", "int8", "bfloat16"),
    "int8, by channel": ("bfloat16", "int8-channel", "bfloat16"),
    "bfloat16, KV int8": ("bfloat16", None, "int8"),
    "int8 of 32, KV int8": ("bfloat16", "int8", "int8"),
}


@dataclass(frozen=True)
class Answers:
    """Of each place but the last: the log-probability of the next token, and the likeliest one."""

    logprobs: np.ndarray  # [T - 1] float32
    likeliest: np.ndarray  # [T - 1] int32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--backend", choices=("auto", "native", "xla"), default="auto")
    args = parser.parse_args()
    print("| model | form | tokens | perplexity | top-1 as float32 | mean error | largest error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model in args.models:
        wanted = None
        for form in FORMS:
            found = read(model, args.text.read_text(encoding="utf-8"), *FORMS[form], args.backend)
            wanted = wanted or found
            error = np.abs(found.logprobs - wanted.logprobs)
            same = np.mean(found.likeliest == wanted.likeliest)
            print(
                f"| {model} | {form} | {len(error) + 1:,} | {math.exp(-found.logprobs.mean()):.3f} "
                f"| {same:.2%} | {error.mean():.4f} | {error.max():.3f} |",
                flush=True,
            )
    return 0


def read(
    name: str, text: str, dtype: str, quantization: str | None, kv_dtype: str, backend_name: str
) -> Answers:
    """What the model answers at each place of `text`."""
    files = open_model(name)
    model, tokenizer = files.config, files.load_tokenizer()
    ids = np.array(tokenizer.encode(text, add_bos=tokenizer.add_bos), np.int32)
    backend = choose(backend_name, backend_name, head_dim=model.head_dim)
    decoder = abstract_decoder(model, dtype, quantization)
    leaves = prepare_params(decoder, files.load_params(dtype, quantization=quantization), backend)
    files.close()
    graph, abstract = nnx.split(decoder)
    structure = jax.tree.structure(abstract)
    num_pages = -(-len(ids) // CHUNK) * CHUNK // EngineConfig.page_size
    config = EngineConfig(max_model_len=len(ids), num_pages=1 + num_pages)
    table = np.arange(1, 1 + num_pages, dtype=np.int32)[None]

    @partial(jax.jit, donate_argnums=1)
    def step(leaves: Any, kv: Any, batch: Batch, following: jax.Array) -> Any:
        merged = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
        hidden, kv = merged.hidden(kv, batch, backend, page_size=config.page_size)
        logits = merged.logits(hidden[0], backend)  # [CHUNK, V]
        told = jnp.take_along_axis(logits, following[:, None], axis=-1)[:, 0]
        return kv, told - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1)

    kv = zeros(kv_shapes(model, config, jnp.dtype(kv_dtype), backend.pool_lanes), backend.zeros)
    logprobs, likeliest = [], []
    for start in range(0, len(ids) - 1, CHUNK):
        count = min(CHUNK, len(ids) - 1 - start)
        tokens, following = (np.pad(ids[at : at + count], (0, CHUNK - count)) for at in (start, start + 1))
        batch = Batch(tokens[None], table, np.array([start], np.int32), np.array([count], np.int32))
        kv, told, best = step(leaves, kv, batch, following)
        logprobs.append(np.asarray(told)[:count])
        likeliest.append(np.asarray(best)[:count])
    return Answers(np.concatenate(logprobs), np.concatenate(likeliest))


if __name__ == "__main__":
    sys.exit(main())
