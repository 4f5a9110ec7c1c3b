"""The bodies of the Responses API: structs, and the table of fields not supported. Items are responses_items.py's.

Images, files and tools other than functions are refused by name. Knows no engine.
"""
from __future__ import annotations

from typing import Any

import msgspec

from frontend.openai.answers import Usage
from frontend.openai.protocol import NeutralValues
from frontend.openai.responses_items import OutputItem
from ipc.errors import RequestError


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses: OpenAI's fields, then those of ours that chat completions take too."""
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    store: bool | None = None                   # default: true, in memory
    background: bool | None = None
    include: list[str] | None = None            # log-probabilities of the text
    top_logprobs: int | None = None             # alternatives of each token
    truncation: str | None = None               # auto: leave out the oldest items of an input that is too long
    max_tool_calls: int | None = None           # of tools that run on a server, of which there are none
    metadata: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None   # functions
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None     # false: at most one call, where a grammar enforces calls
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    session_id: Any = None
    user: str | None = None
    reasoning: dict[str, Any] | None = None     # {"effort": ...}, where the model's template has levels
    text: dict[str, Any] | None = None          # {"format": ...}: text, json_object or json_schema
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None               # as the header x-request-id, which wins
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None    # vLLM's, instead of text
    include_reasoning: bool | None = None       # false: what the model thinks is left out


# Documented by OpenAI, or vLLM's for chats, not supported: the values that ask for nothing.
NEUTRAL: NeutralValues = {
    "access_programs": (), "background_options": (), "context_management": ([],), "conversation": (), "image": (),
    "moderation": (), "prompt": (), "stream_options": ({}, {"include_obfuscation": False}),
    "ec_transfer_params": (), "enable_response_messages": (False,), "kv_transfer_params": (), "media_io_kwargs": ({},),
    "mm_payload": ("tensors",), "mm_processor_kwargs": ({},), "previous_input_messages": ([],),
    "return_mm_kwargs": (False,), "vllm_xargs": ({},), "watermarking": (False,),
    "add_generation_prompt": (True,), "chat_template": (), "continue_final_message": (False,), "documents": ([],),
    "echo": (False,), "logprobs": (False,), "prompt_logprobs": (),
    "reasoning_effort": (), "response_format": (), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "thinking_token_budget": (),
    "truncate_prompt_tokens": (), "truncation_side": (),
}


class InputTokensDetails(msgspec.Struct):
    """Where input tokens came from."""
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """What output tokens are."""
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens of one response."""
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why a response failed."""
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why a response ended early."""
    reason: str


class ResponseBody(msgspec.Struct, kw_only=True):
    """One response: the answer, and what events about it carry."""
    id: str
    created_at: int
    model: str
    status: str                                 # queued, in_progress, completed, incomplete, failed or cancelled
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] = {}
    temperature: float = 1.0
    top_p: float = 1.0
    store: bool = True
    background: bool = False
    user: str | None = None
    parallel_tool_calls: bool = True
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    text: dict[str, Any] = msgspec.field(default_factory=lambda: {"format": {"type": "text"}})
    truncation: str = "disabled"
    top_logprobs: int | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, str | None] = msgspec.field(default_factory=lambda: {"effort": None, "summary": None})
    object: str = "response"


class DeletedResponse(msgspec.Struct):
    """The answer of DELETE /v1/responses/{id}."""
    id: str
    object: str = "response"
    deleted: bool = True


def usage_of(usage: Usage) -> ResponseUsage:
    """The counts under this API's names."""
    details = usage.completion_tokens_details
    thinking = 0 if isinstance(details, msgspec.UnsetType) else details.reasoning_tokens
    return ResponseUsage(usage.prompt_tokens, InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
                         usage.completion_tokens, OutputTokensDetails(thinking), usage.total_tokens)


def effort_of(reasoning: dict[str, Any] | None) -> str | None:
    """The wanted effort; summaries of thoughts are not made, and "auto" does not insist on one. Raises RequestError
    that names what cannot be honoured."""
    given = {name: value for name, value in (reasoning or {}).items() if value is not None}
    effort = given.pop("effort", None)
    for name, value in given.items():
        if name in ("summary", "generate_summary") and value == "auto":
            continue
        raise RequestError(f"reasoning.{name} is given, which this server does not support; leave it out",
                           f"reasoning.{name}")
    if effort is not None and not isinstance(effort, str):
        raise RequestError("reasoning.effort must be text", "reasoning.effort")
    return effort
