"""The shapes of answers, for the OpenAPI document. Rendering does without them; tests compare the two."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Every field is there in each answer; further ones may be."""

    model_config = ConfigDict(extra="allow")


class ErrorDetails(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Answer):
    error: ErrorDetails


class PromptTokensDetails(Answer):
    cached_tokens: int


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


FinishReason = Literal["stop", "length", "tool_calls"]


class CompletionChoice(Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class CompletionAnswer(Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[Any]


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason
    stop_reason: str | int | None


class ChatAnswer(Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage


class ResponsesUsage(Answer):
    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class OutputItem(Answer):
    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["completed", "incomplete"]


class ResponsesAnswer(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage
    store: Literal[False]


class Embedding(Answer):
    object: Literal["embedding"]
    index: int  # of the text in `input`
    embedding: list[float] | str  # numbers, or their bytes in base64


class EmbeddingsUsage(Answer):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingsAnswer(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


class TokenizeAnswer(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(Answer):
    prompt: str


class TokenizerInfoAnswer(Answer):
    tokenizer_class: str
    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str | None
    chat_template_names: list[str]


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int
    default_sampling_params: dict[str, float]


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(Answer):
    version: str


class LoadAnswer(Answer):
    server_load: int
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
