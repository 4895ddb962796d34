"""Which waiting chunks share one prefill rectangle."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.engine.config import EngineConfig, Shape


def pack(chunks: Sequence[int], config: EngineConfig) -> tuple[Shape, list[int]]:
    """Choose a listed shape (B, Q) and the rows that fill it, as indexes into `chunks`, ascending.

    `chunks` holds the next chunk's length of each sequence in prefill, oldest first, each in
    [1, max_chunk]. The oldest is always chosen, so none waits forever; for each Q the others join in
    order wherever they fit. Of all such rectangles the one wins that saves most against giving each of
    its rows a step of its own, where a step costs B * Q plus `prefill_step_cost`. So rows of similar
    length travel together, and a short one is not padded to the length of a long one.

    Cost: len(chunks) times the number of listed Q.
    """
    first_shape = config.prefill_bucket(1, chunks[0])
    assert first_shape is not None, f"a chunk of {chunks[0]} tokens fits no listed shape"
    if len(chunks) == 1:
        return first_shape, [0]
    step_cost = config.prefill_step_cost
    cost_alone = {chunk: _area(config.prefill_bucket(1, chunk)) + step_cost for chunk in set(chunks)}

    best_saving, best_shape, best_count = 0, first_shape, 1
    for queries, batches in config.prefill_batches:
        if queries < chunks[0]:
            continue
        largest = batches[-1]
        count = saved = 0
        for chunk in chunks:
            if chunk > queries:
                continue
            count += 1
            saved += cost_alone[chunk]
            if count in batches and (saving := saved - count * queries - step_cost) > best_saving:
                best_saving, best_shape, best_count = saving, (count, queries), count
            if count == largest:
                break
        else:  # the rows ran out before the largest batch was full: pad up to the next one
            batch = next(b for b in batches if b >= count)
            if (saving := saved - batch * queries - step_cost) > best_saving:
                best_saving, best_shape, best_count = saving, (batch, queries), count
    fitting = (i for i, chunk in enumerate(chunks) if chunk <= best_shape[1])
    return best_shape, [next(fitting) for _ in range(best_count)]


def _area(shape: Shape | None) -> int:
    assert shape is not None, "a chunk fits no listed shape"
    return shape[0] * shape[1]
