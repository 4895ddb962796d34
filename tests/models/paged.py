"""A decoder run over pages, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Batch, KVCache, abstract_decoder
from jaxserve.ops.backend import XLA, Backend
from jaxserve.runtime.runner import prepare_params
from jaxserve.weights.model_files import open_model

PAGE_SIZE, NUM_PAGES = 8, 20


def load(path: Path) -> tuple[ModelConfig, dict[str, jax.Array]]:
    files = open_model(path)
    try:
        return files.config, files.load_params("float32")
    finally:
        files.close()


class Decoder:
    """A loaded decoder, run over pages: sequences are rows, fed in chunks of at most `queries`."""

    def __init__(
        self,
        model: ModelConfig,
        params: dict[str, jax.Array],
        backend: Backend = XLA,
        quantization: str | None = None,
    ):
        decoder = abstract_decoder(model, "float32", quantization)
        graph, abstract = nnx.split(decoder)
        structure = jax.tree.structure(abstract)
        self._leaves = prepare_params(decoder, dict(params), backend)
        slots = model.num_layers, NUM_PAGES * PAGE_SIZE, model.num_kv_heads
        # What nobody wrote is NaN: reading it would show.
        self._kv = KVCache(
            np.full((*slots, model.head_dim), np.nan, np.float32),
            np.full((*slots, model.value_head_dim), np.nan, np.float32),
        )

        @jax.jit
        def run(leaves: Any, kv: KVCache, batch: Batch) -> Any:
            merged = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
            hidden, kv = merged.hidden(kv, batch, backend, page_size=PAGE_SIZE)
            return merged.logits(hidden, backend), kv

        self._run = run

    def logits(self, sequences: list[list[int]], chunks: list[list[int]], queries: int) -> list[np.ndarray]:
        """Logits [T, V] of each sequence; chunks[i][j] tokens of sequence i go into step j."""
        B, kv = len(sequences), self._kv
        per_row = (NUM_PAGES - 1) // B
        table = 1 + np.random.default_rng(B).permutation(NUM_PAGES - 1)[: B * per_row].reshape(B, per_row)
        out: list[list[np.ndarray]] = [[] for _ in sequences]
        start = np.zeros(B, np.int32)
        for step in range(len(chunks[0])):
            tokens, lens = np.zeros((B, queries), np.int32), np.zeros(B, np.int32)
            for row, ids in enumerate(sequences):
                lens[row] = chunks[row][step]
                tokens[row, : lens[row]] = ids[start[row] : start[row] + lens[row]]
            logits, kv = self._run(self._leaves, kv, Batch(tokens, table.astype(np.int32), start, lens))
            for row in range(B):
                out[row].append(np.asarray(logits[row, : lens[row]]))
            start = start + lens
        return [np.concatenate(parts) for parts in out]
