"""From a GGUF file or a Hugging Face folder to a checkpoint that loads fast."""

from __future__ import annotations

import os
from pathlib import Path

from jaxserve.errors import WeightsError
from jaxserve.weights.checkpoint import write_checkpoint
from jaxserve.weights.loader import held_bytes
from jaxserve.weights.manifest import is_checkpoint
from jaxserve.weights.model_files import CHECKPOINTS, open_model, served_quantization
from jaxserve.weights.progress import Progress
from jaxserve.weights.staging import require_space, staging_folder, sync, sync_tree

OVERHEAD_BYTES = 64 << 20  # tokenizer, metadata


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    dtype: str = "bfloat16",
    quantization: str | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    checkpoints: Path = CHECKPOINTS,
) -> Path:
    """Write the model `src` (see `open_model`) to the folder `dst`, with all that its files say of text.

    That is the tokenizer, the chat templates and how it wants to be sampled. Dense weights are int8 with a
    `quantization` of ops/quant.py, or where `src` is a checkpoint of such; the folder is then served so.
    `dst` appears when it is complete, by one rename; an interrupted conversion leaves at most a hidden
    folder beside it, which the next one removes. Host memory stays near the size of the result plus one
    tensor. Raises WeightsError, also when `dst` is there already (unless `overwrite`, which replaces a
    checkpoint but never a folder that is none).
    """
    from jaxserve.tokenizer import load
    from jaxserve.tokenizer.generation import write_generation
    from jaxserve.tokenizer.template_files import write_templates

    dst = Path(os.path.abspath(dst))
    _check_target(dst, overwrite)
    model = open_model(src, checkpoints=checkpoints)
    try:
        quantization = served_quantization(model, quantization)
        require_space(dst, held_bytes(model.param_shapes, dtype, quantization) + OVERHEAD_BYTES)
        with staging_folder(dst) as staging:
            work = staging / dst.name
            work.mkdir()
            # The cheap part first: a tokenizer that can't be read fails before the long work.
            load.save(model.load_tokenizer(), work)
            write_templates(model.chat_templates(), work)
            write_generation(model.generation_config(), work)
            params = dict(model.read_params(dtype, progress, quantization))
            write_checkpoint(
                work, params, model.config, dtype=dtype, quantization=quantization, source=model.path.name,
                progress=progress,
            )  # fmt: skip
            sync_tree(work)
            if dst.exists():
                dst.rename(staging / "replaced")
            work.rename(dst)
            sync(dst.parent)
    finally:
        model.close()
    return dst


def _check_target(dst: Path, overwrite: bool) -> None:
    if not dst.exists():
        return
    if not dst.is_dir() or (not is_checkpoint(dst) and any(dst.iterdir())):
        raise WeightsError(f"{dst} exists and is no jaxserve checkpoint: choose another place")
    if not is_checkpoint(dst):
        dst.rmdir()
    elif not overwrite:
        raise WeightsError(f"{dst} exists already: overwrite it on request, or choose another place")


