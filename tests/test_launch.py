"""From files to an engine that answers, with a tiny model of random weights."""

from __future__ import annotations

import queue
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve import native
from jaxserve.errors import (
    ConfigError,
    ContextLengthError,
    JaxserveError,
    TokenizerError,
    UnavailableError,
    WeightsError,
)
from jaxserve.launch import LaunchOptions, LoadedEngine, compile_cache_folder, load_engine
from jaxserve.tokenizer import load
from jaxserve.types import Event, Request, SamplingParams
from jaxserve.weights.convert import convert
from jaxserve.weights.gguf import GGUFSource
from tests.models.tiny import LLAMA, hf_tensors, write_gguf, write_hf

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_vocabulary() -> list[str]:
    """GPT-2's spelling of the 256 bytes, a merge and two special tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    spelling = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [spelling[byte] for byte in range(256)] + ["he", "<|start|>", "<|end|>"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One llama as a GGUF file and as a Hugging Face folder, tokenizer and chat template included."""
    folder = tmp_path_factory.mktemp("models")
    vocabulary = byte_vocabulary()
    config = LLAMA | {
        "vocab_size": len(vocabulary),
        "max_position_embeddings": 100,
        "rms_norm_eps": 2.0**-17,  # the same in float32, so both formats are one model to the compile cache
    }
    tensors = hf_tensors(config)
    gguf = write_gguf(
        folder / "tiny.gguf", config, tensors,
        tokenizer__ggml__model="gpt2", tokenizer__ggml__pre="smollm", tokenizer__ggml__tokens=vocabulary,
        tokenizer__ggml__token_type=[1] * 257 + [3, 3], tokenizer__ggml__merges=["h e"],
        tokenizer__ggml__bos_token_id=257, tokenizer__ggml__eos_token_id=258,
        tokenizer__chat_template=TEMPLATE,
    )  # fmt: skip
    hf = write_hf(folder / "tiny-hf", config, tensors)
    load.save(load.from_gguf(GGUFSource(gguf).metadata), hf)
    (hf / "chat_template.jinja").write_text(TEMPLATE)
    return {"gguf": gguf, "hf": hf, "cache": folder / "cache"}


@pytest.fixture
def options(files: dict[str, Path]) -> LaunchOptions:
    """Few and small steps, kept for the next test."""
    return LaunchOptions(
        str(files["gguf"]), dtype="float32", max_num_seqs=2, max_num_batched_tokens=32,
        compile_cache=files["cache"], kv_cache_memory=1 << 20,
    )  # fmt: skip


class Answers:
    """What an engine delivers, from its own thread."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()

    def __call__(self, events: list[Event]) -> None:
        for event in events:
            self.events.put(event)

    def ask(self, loaded: LoadedEngine, prompt: str, params: SamplingParams) -> tuple[list[int], Event]:
        ids = tuple(loaded.tokenizer.encode(prompt))
        loaded.engine.submit(Request("one", ids, params, time.monotonic()))
        out: list[int] = []
        while True:
            event = self.events.get(timeout=60)
            out.extend(event.token_ids)
            if event.finish_reason is not None:
                return out, event


@pytest.fixture
def launch() -> Iterator[Callable[[LaunchOptions], tuple[LoadedEngine, Answers]]]:
    """`load_engine`, and an end to whatever it started."""
    started: list[LoadedEngine] = []

    def start(options: LaunchOptions) -> tuple[LoadedEngine, Answers]:
        answers = Answers()
        started.append(load_engine(options, deliver=answers))
        return started[-1], answers

    yield start
    for loaded in started:
        loaded.engine.stop()


GREEDY = SamplingParams(8, temperature=0.0, ignore_eos=True)


def test_a_model_file_becomes_an_engine_that_answers_and_stops(launch, options):
    loaded, answers = launch(options)
    assert loaded.model_name == "tiny"
    assert loaded.vocab_size == 259
    # A position takes 3 layers x 2 heads x 16 x 2 x 4 bytes = 768, a page of 16 of them 12 KiB.
    assert (loaded.config.num_pages, loaded.config.max_model_len) == (2 * 7 + 1, 100)
    assert loaded.chat_template is not None
    assert loaded.chat_template.render([{"role": "user", "content": "hi"}]) == "hi"
    ids, last = answers.ask(loaded, "hello", GREEDY)
    assert len(ids) == 8
    assert (last.finish_reason, last.num_prompt_tokens, last.num_output_tokens) == ("length", 4, 8)
    again, _ = answers.ask(loaded, "hello", GREEDY)
    assert again == ids
    assert loaded.compilations_after_warmup() == 0
    assert loaded.engine.stop()
    with pytest.raises(UnavailableError):
        answers.ask(loaded, "hello", GREEDY)


def test_all_formats_and_backends_answer_the_same(launch, options, files):
    answered = []
    backends = ["xla", *(["native"] if native.available()[0] else [])]
    for model, backend in [(files["gguf"], name) for name in backends] + [(files["hf"], backends[-1])]:
        chosen = replace(options, model=str(model), attention_backend=backend, linear_backend=backend)
        loaded, answers = launch(chosen)
        answered.append(answers.ask(loaded, "hello", GREEDY)[0])
        assert loaded.chat_template is not None
    assert len({tuple(ids) for ids in answered}) == 1


def test_progress_goes_from_nothing_to_all_in_every_stage(options):
    seen: dict[str, list[tuple[int, int]]] = {}
    loaded = load_engine(
        options, deliver=lambda events: None,
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    )  # fmt: skip
    loaded.engine.stop()
    assert seen.keys() == {"loading weights", "compiling steps"}
    for stage in seen.values():
        done, totals = [d for d, _ in stage], {t for _, t in stage}
        assert done == sorted(done)
        assert totals == {done[-1]}


def test_options_reach_the_engine(launch, options, caplog):
    caplog.set_level("INFO", "jaxserve.launch")
    chosen = replace(
        options, dtype="auto", max_model_len=48, block_size=8, max_num_queued_reqs=3, max_queued_tokens=77,
        queue_timeout=9.0, step_timeout=55.0, scheduling_policy="priority", admission="reserve",
        enable_prefix_caching=False,
    )  # fmt: skip
    loaded, answers = launch(chosen)
    config = loaded.config
    assert (config.max_model_len, config.page_size, config.max_num_seqs) == (48, 8, 2)
    assert (config.max_num_queued, config.max_queued_tokens, config.queue_timeout_s) == (3, 77, 9.0)
    assert (config.scheduling_policy, config.admission) == ("priority", "reserve")
    assert (config.step_timeout_s, config.enable_prefix_caching) == (55.0, False)
    assert config.max_chunk == 32
    assert config.num_pages == 2 * 6 + 1  # what two slots can fill, and the trash page
    memory = loaded.memory
    assert memory.kv_bytes_per_token == 2 * 3 * 2 * 16 * 2  # K and V, layers, heads, their size, bfloat16
    assert (memory.kv_tokens, memory.num_full_requests, memory.max_model_len) == (96, 2, 48)
    assert memory.kv_bytes == 13 * 8 * memory.kv_bytes_per_token
    with pytest.raises(ContextLengthError, match="48"):
        answers.ask(loaded, "x" * 48, GREEDY)
    assert len(answers.ask(loaded, "x" * 40, GREEDY)[0]) == 8
    assert "bfloat16" in caplog.text


def test_deterministic_reaches_the_steps_and_answers_the_same(launch, options):
    chosen = replace(options, deterministic=True, max_num_batched_tokens=64, max_num_seqs=3)
    loaded, answers = launch(chosen)
    assert loaded.config.decode_buckets == (3,)
    assert loaded.config.prefill_buckets == ((1, 32), (1, 64))
    params = replace(GREEDY, logprobs=0)
    first, last = answers.ask(loaded, "hello", params)
    again, last_again = answers.ask(loaded, "hello", params)
    assert (again, last_again.logprobs) == (first, last.logprobs)


def test_int8_weights_are_served_from_floats_and_from_a_converted_folder_alike(
    launch, options, tmp_path, caplog
):
    caplog.set_level("INFO", "jaxserve.launch")
    folder = convert(options.model, tmp_path / "int8", dtype="float32", quantization="int8-channel")
    floats, answered = launch(options)[0].memory.weights_bytes, []
    chosen = replace(options, deterministic=True)
    for one in (replace(chosen, quantization="int8-channel"), replace(chosen, model=str(folder))):
        loaded, answers = launch(one)
        ids, last = answers.ask(loaded, "hello", replace(GREEDY, logprobs=0))
        answered.append((ids, last.logprobs))
        # Of float32 a quarter, with the scales and what stays as it is.
        assert floats / 4 < loaded.memory.weights_bytes < floats / 3
    assert answered[0] == answered[1]
    assert caplog.text.count("float32 with int8-channel weights") == 2


@pytest.mark.parametrize(
    ("quantization", "message"),
    [("int8", r"layers\.mlp\.down\.weight has rows of 40 weights.*use int8-channel"),
     ("fp4", "quantization 'fp4' is not supported: one of int8, int8-channel")],
)  # fmt: skip
def test_a_quantization_that_does_not_suit_the_model_is_an_error_before_it_is_loaded(
    options, quantization, message, monkeypatch
):
    monkeypatch.setattr(GGUFSource, "read_rows", lambda *_: pytest.fail("a tensor is read"))
    with pytest.raises(ConfigError, match=message):
        load_engine(replace(options, quantization=quantization), deliver=lambda events: None)


def test_compilations_are_no_longer_counted_once_the_engine_is_stopped(options):
    loaded = load_engine(options, deliver=lambda events: None)
    jax.jit(lambda x: x + 1)(np.ones(3))
    counted = loaded.compilations_after_warmup()
    assert counted > 0
    for size in (4, 5):
        loaded.engine.stop()
        jax.jit(lambda x: x + 1)(np.ones(size))
        assert loaded.compilations_after_warmup() == counted


def test_a_chat_template_of_the_users_goes_before_the_models_own(launch, options, tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("MINE {{ messages[0]['content'] }} {{ eos_token }}")
    loaded, _ = launch(replace(options, chat_template=file))
    assert loaded.chat_template is not None
    assert loaded.chat_template.render([{"role": "user", "content": "hi"}]) == "MINE hi <|end|>"


def with_files(source: Path, target: Path, files: dict[str, str]) -> str:
    """A copy of the model folder `source` with these files beside its own."""
    shutil.copytree(source, target)
    for name, text in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(text)
    return str(target)


def test_all_templates_of_a_model_are_there_and_the_user_may_choose_one_by_name(
    launch, options, files, tmp_path
):
    more = {f"additional_chat_templates/{name}.jinja": f"{name}!" for name in ("tool_use", "rag")}
    chosen = replace(options, model=with_files(files["hf"], tmp_path / "m", more))
    loaded, _ = launch(chosen)
    template = loaded.chat_template
    assert template is not None
    assert set(template.named) == {"default", "tool_use", "rag"}
    assert template.pick(tools=True).render([]) == "tool_use!"
    loaded, _ = launch(replace(chosen, chat_template=Path("rag")))
    assert loaded.chat_template is not None
    assert loaded.chat_template.pick(tools=True).render([]) == "rag!"


def test_defaults_of_sampling_are_the_models_own_or_none_or_those_of_another_folder(
    launch, options, files, tmp_path
):
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"temperature": 0.2}')
    own = with_files(
        files["hf"], tmp_path / "m", {"generation_config.json": '{"top_k": 7, "max_new_tokens": 5}'}
    )
    for chosen, sampling, max_tokens in (
        ("auto", {"top_k": 7}, 5), ("none", {}, None), (str(other), {"temperature": 0.2}, None),
    ):  # fmt: skip
        loaded, _ = launch(replace(options, model=own, generation_config=chosen))
        assert (dict(loaded.generation.sampling), loaded.generation.max_tokens) == (sampling, max_tokens)


def test_templates_and_defaults_that_can_not_be_used_are_one_line_that_says_what_to_change(
    options, files, tmp_path
):
    broken = with_files(files["hf"], tmp_path / "a", {"generation_config.json": '{"top_p": 3}'})
    nameless = with_files(files["hf"], tmp_path / "b", {"additional_chat_templates/rag.jinja": "{{ x }}"})
    Path(nameless, "chat_template.jinja").unlink()
    syntax = with_files(files["hf"], tmp_path / "c", {"additional_chat_templates/rag.jinja": "{% for %}"})
    for change, error, message in (
        ({"model": broken}, ConfigError, r"a/generation_config\.json: top_p is 3; expected .* none$"),
        ({"model": nameless}, ConfigError, "templates named rag, and none named default: .*--chat-template"),
        ({"model": syntax}, TokenizerError, "chat template 'rag', line 1"),
        ({"model": syntax, "chat_template": Path("nix")}, ConfigError, "model's own are default, rag$"),
        ({"generation_config": "nix"}, ConfigError, r"generation_config=nix: there is no generation_config"),
    ):
        with pytest.raises(error, match=message) as raised:
            load_engine(replace(options, **change), deliver=lambda events: None)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "no-such-model"}, WeightsError, "'no-such-model' not found"),
        ({"dtype": "float16"}, ConfigError, "'float16'.*bfloat16, float32"),
        ({"max_model_len": 101}, ConfigError, "max_model_len=101 is over the 100 positions"),
        ({"max_model_len": 100, "kv_cache_memory": 49152}, ConfigError, "max_model_len=100 needs 98304 "),
        ({"max_model_len": 0}, ConfigError, "max_model_len=0"),
        ({"kv_cache_memory": 1000}, ConfigError, "kv_cache_memory=1000"),
        ({"kv_cache_memory": 1 << 60, "max_num_seqs": 1 << 40}, ConfigError,
         "a KV cache of .* bytes are needed, .* are free; lower --kv-cache-memory, --max-num-seqs or"),
        ({"block_size": 0}, ConfigError, "block_size=0"),
        ({"max_num_seqs": 0}, ConfigError, "max_num_seqs=0"),
        ({"max_num_batched_tokens": 0}, ConfigError, r"max_prefill_tokens=0 .*--max-num-batched-tokens\)"),
        ({"max_num_queued_reqs": -1}, ConfigError, r"max_num_queued=-1 .*\(flag --max-num-queued-reqs\)"),
        ({"queue_timeout": -1.0}, ConfigError, r"queue_timeout_s=-1.0 .*\(flag --queue-timeout\)"),
        ({"deterministic": True, "decode_steps": 4}, ConfigError, "decode_steps=4 contradicts deterministic"),
        ({"scheduling_policy": "lifo"}, ConfigError, "scheduling_policy='lifo'.*fcfs, priority"),
        ({"admission": "hope"}, ConfigError, "admission='hope'"),
        ({"attention_backend": "cuda"}, ConfigError, "attention_backend: 'cuda'.*native"),
        ({"linear_backend": "cuda"}, ConfigError, "linear_backend: 'cuda'"),
        ({"kv_cache_dtype": "int4"}, ConfigError, "kv_cache_dtype='int4' must be one of auto, int8"),
        ({"chat_template": Path("no/such.jinja")}, ConfigError, r"chat_template=no/such\.jinja can't be"),
    ],
)
def test_an_option_that_can_not_be_met_is_one_line_that_names_it(options, change, error, message):
    with pytest.raises(error, match=message) as raised:
        load_engine(replace(options, **change), deliver=lambda events: None)
    assert isinstance(raised.value, JaxserveError)
    assert "\n" not in str(raised.value)


def test_weights_that_do_not_fit_are_refused_before_they_are_read(options, monkeypatch):
    monkeypatch.setattr("jaxserve.runtime.memory.available_host_bytes", lambda: 4096)
    with pytest.raises(ConfigError, match=r"weights of tiny.* in float32: \d+ bytes .* 4096 are free"):
        load_engine(options, deliver=lambda events: None)


def test_a_backend_that_can_not_run_is_an_error_not_another_backend(options, monkeypatch):
    monkeypatch.setattr(native, "available", lambda: (False, "it was not built"))
    with pytest.raises(ConfigError, match="linear_backend=native can't run here: it was not built"):
        load_engine(replace(options, linear_backend="native"), deliver=lambda events: None)


def test_files_that_are_no_model_or_no_template_are_one_line(options, tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    template = tmp_path / "broken.jinja"
    template.write_text("{% for %}")
    binary = tmp_path / "binary.jinja"
    binary.write_bytes(b"\xff\xfe\xff")
    for change, error in (
        ({"model": str(broken)}, WeightsError),
        ({"chat_template": template}, TokenizerError),
        ({"chat_template": binary}, ConfigError),
    ):
        with pytest.raises(error) as raised:
            load_engine(replace(options, **change), deliver=lambda events: None)
        assert "\n" not in str(raised.value)


def test_compiled_programs_go_where_the_user_says(monkeypatch, tmp_path):
    assert compile_cache_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert compile_cache_folder(None) == tmp_path / "cache" / "jaxserve" / "compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert compile_cache_folder(None) == tmp_path / "home" / ".cache" / "jaxserve" / "compiled"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"compile_cache=.*; name a folder to write to"):
        compile_cache_folder(tmp_path / "file" / "below")
