"""The only wiring: files -> weights and tokenizer -> runner -> engine. Front ends take it from there."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

from jaxserve.engine.config import CPU_PREFILL_TOKENS, EngineConfig, pages_within
from jaxserve.engine.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.ops.backend import choose
from jaxserve.runtime.compilations import CompilationCounter
from jaxserve.runtime.memory import default_kv_budget, fit_pool, memory_use, require_room
from jaxserve.runtime.runner import ModelRunner
from jaxserve.runtime.shaping import shaping_bytes
from jaxserve.runtime.state import kv_bytes_per_token
from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.chat import ChatTemplate, chat_template
from jaxserve.tokenizer.generation import FILE, GenerationDefaults, generation_from_folder
from jaxserve.tokenizer.template_files import DEFAULT
from jaxserve.types import Event, KernelsInUse, MemoryUse, Pooling
from jaxserve.weights.loader import held_bytes
from jaxserve.weights.model_files import ModelFiles, open_model, served_quantization

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
KV_CACHE_DTYPES = ("auto", "int8")


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """What a user may choose. Fields are named as the flags of `jaxserve serve`; None means a default."""

    model: str  # a name in checkpoints/, a .gguf file, or a folder
    dtype: str = "auto"  # of weights, activations and, unless `kv_cache_dtype` is another, KV cache
    quantization: str | None = None  # of dense weights: int8 or int8-channel; None: as they are stored
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = EngineConfig.max_num_seqs
    max_num_batched_tokens: int | None = None
    max_num_queued_reqs: int = EngineConfig.max_num_queued
    block_size: int = EngineConfig.page_size
    kv_cache_memory: int | None = None  # bytes
    max_queued_tokens: int = EngineConfig.max_queued_tokens
    queue_timeout: float | None = EngineConfig.queue_timeout_s
    step_timeout: float = EngineConfig.step_timeout_s
    scheduling_policy: Literal["fcfs", "priority"] = EngineConfig.scheduling_policy
    admission: Literal["optimistic", "reserve"] = EngineConfig.admission
    enable_prefix_caching: bool = EngineConfig.enable_prefix_caching
    deterministic: bool = EngineConfig.deterministic
    decode_steps: int = EngineConfig.decode_steps
    max_logprobs: int = EngineConfig.max_logprobs
    pooling: Pooling = EngineConfig.pooling
    attention_backend: str = "auto"
    linear_backend: str = "auto"
    compile_cache: Path | None = None
    chat_template: Path | None = None  # in place of the model's own, or the name of one of these
    generation_config: str = "auto"  # the model's own; "none", or a folder that has another


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A model that serves: the engine is started, and its owner stops it."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    generation: GenerationDefaults
    config: EngineConfig
    model_name: str
    vocab_size: int
    memory: MemoryUse
    kernels: KernelsInUse
    compilations_after_warmup: Callable[[], int]


def load_engine(
    options: LaunchOptions,
    *,
    deliver: Callable[[list[Event]], None],
    progress: Progress | None = None,
) -> LoadedEngine:
    """Load the model, size the pool, compile every step, and start the engine around them.

    Raises WeightsError, TokenizerError or ConfigError, whose texts are for the user.
    """
    cache = compile_cache_folder(options.compile_cache)
    files = open_model(options.model)
    try:
        tokenizer = files.load_tokenizer()
        template = _chat_template(tokenizer, options.chat_template, files.chat_templates())
        generation = _generation_defaults(options.generation_config, files)
        backend = choose(
            options.attention_backend, options.linear_backend,
            head_dim=files.config.head_dim,
        )
        dtype = "bfloat16" if options.dtype == "auto" else options.dtype
        quantization = served_quantization(files, options.quantization)
        remedy = "serve a smaller model"
        if quantization is None:
            remedy += ", or with --quantization int8" + " or --dtype bfloat16" * (dtype == "float32")
        num_bytes = held_bytes(files.param_shapes, dtype, quantization)
        require_room(num_bytes, f"the weights of {files.name} in {quantization or dtype}", remedy)
        params = files.load_params(dtype, progress, quantization)
        model, name = files.config, files.name
    finally:
        files.close()

    if options.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype={options.kv_cache_dtype!r} must be one of {', '.join(KV_CACHE_DTYPES)}"
        )
    kv_dtype = dtype if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
    bytes_per_token = kv_bytes_per_token(model, kv_dtype, backend.pool_lanes)
    shaping = shaping_bytes(model.vocab_size, options.max_num_seqs)
    budget = options.kv_cache_memory
    num_pages, max_model_len = fit_pool(
        budget=default_kv_budget(reserved=shaping) if budget is None else budget,
        bytes_per_token=bytes_per_token,
        page_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        max_position=model.max_position,
        most_pages=None if model.window is None else pages_within(
            model.window, options.block_size, _prefill_tokens(options.max_num_batched_tokens),
            options.decode_steps,
        ),
    )  # fmt: skip
    config = EngineConfig(
        max_model_len=max_model_len,
        num_pages=num_pages,
        page_size=options.block_size,
        max_num_seqs=options.max_num_seqs,
        max_num_queued=options.max_num_queued_reqs,
        max_prefill_tokens=_prefill_tokens(options.max_num_batched_tokens),
        max_queued_tokens=options.max_queued_tokens,
        queue_timeout_s=options.queue_timeout,
        step_timeout_s=options.step_timeout,
        scheduling_policy=options.scheduling_policy,
        admission=options.admission,
        window=model.window,
        enable_prefix_caching=options.enable_prefix_caching,
        deterministic=options.deterministic,
        decode_steps=options.decode_steps,
        max_logprobs=options.max_logprobs,
        pooling=options.pooling,
    )
    require_room(
        num_pages * config.page_size * bytes_per_token,
        f"a KV cache of {num_pages} pages of {config.page_size} tokens",
        "lower --kv-cache-memory, --max-num-seqs or --max-model-len",
    )
    log.info(
        "%s: %s on %s, attention %s, linear %s, %d KV pages of %d tokens (%s, %d bytes a token), context %d, "
        "%d bytes to shape logits by",
        name, dtype if quantization is None else f"{dtype} with {quantization} weights", jax.devices()[0],
        backend.attention_name, backend.linear_name,
        num_pages, config.page_size, kv_dtype, bytes_per_token, max_model_len, shaping,
    )  # fmt: skip
    runner = ModelRunner(
        model, params, config, backend, dtype=dtype, quantization=quantization, kv_dtype=kv_dtype,
        cache=cache, progress=progress,
    )  # fmt: skip
    counter = CompilationCounter()
    engine = Engine(
        config, runner, tokenizer,
        deliver=deliver, vocab_size=model.vocab_size, on_stop=counter.close,
    )  # fmt: skip
    engine.start()
    memory = memory_use(runner.weights_bytes, bytes_per_token, config)
    return LoadedEngine(
        engine, tokenizer, template, generation, config, name, model.vocab_size, memory,
        KernelsInUse(backend.attention_name, backend.linear_name, backend.kernels),
        lambda: counter.count,
    )  # fmt: skip


def _prefill_tokens(chosen: int | None) -> int:
    """`chosen`, or a default for this device."""
    if chosen is not None:
        return chosen
    return CPU_PREFILL_TOKENS if jax.default_backend() == "cpu" else EngineConfig.max_prefill_tokens


def compile_cache_folder(folder: Path | None) -> Path:
    """Where compiled programs are kept for the next start: `folder`, or one in the user's cache folder."""
    if folder is None:
        cache_home = os.environ.get("XDG_CACHE_HOME")
        folder = (Path(cache_home) if cache_home else Path.home() / ".cache") / "jaxserve" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"compile_cache={folder}: {error.strerror}; name a folder to write to") from error
    return folder


def _chat_template(tokenizer: Tokenizer, chosen: Path | None, own: dict[str, str]) -> ChatTemplate | None:
    """All of the model's `own` templates, or the one alone that the user chose: by name, or another file."""
    names = ", ".join(own)
    if chosen is None:
        if own and DEFAULT not in own:
            raise ConfigError(
                f"the model has chat templates named {names}, and none named {DEFAULT}: choose one with "
                "--chat-template NAME"
            )
        others = {name: source for name, source in own.items() if name != DEFAULT}
        return chat_template(tokenizer, own[DEFAULT], others) if own else None
    if str(chosen) in own and not chosen.is_file():
        return chat_template(tokenizer, own[str(chosen)])
    try:
        return chat_template(tokenizer, chosen.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        also = f"; templates of the model's own are {names}" if own else ""
        raise ConfigError(f"chat_template={chosen} can't be read: {error}{also}") from error


def _generation_defaults(chosen: str, files: ModelFiles) -> GenerationDefaults:
    if chosen == "none":
        return GenerationDefaults()
    if chosen == "auto":
        return files.generation_config().defaults()
    if not (Path(chosen) / FILE).is_file():
        raise ConfigError(
            f"generation_config={chosen}: there is no {FILE} in such a folder; auto takes the model's own, "
            "none takes no defaults from any file"
        )
    return generation_from_folder(Path(chosen)).defaults()
