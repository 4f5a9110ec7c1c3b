"""The bodies of answers without stream, in OpenAI's shapes. Chunks of streams are joined by sse.py."""
from __future__ import annotations

import msgspec

from frontend.openai.logprobs import ChatLogprobs, CompletionLogprobs
from frontend.openai.token_details import PromptLogprobs


class PromptTokensDetails(msgspec.Struct):
    """Where prompt tokens came from."""
    cached_tokens: int                          # given by the prefix cache


class CompletionTokensDetails(msgspec.Struct):
    """What completion tokens are."""
    reasoning_tokens: int                       # thoughts and their tags


class Timings(msgspec.Struct):
    """Where the time of a call went, milliseconds; of several prompts, each part of the one that took longest."""
    tokenize_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float


class Usage(msgspec.Struct):
    """Tokens of one call, over all prompts and choices; a prompt counts once whatever n is."""
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET      # of a model that thinks
    timings: Timings | msgspec.UnsetType = msgspec.UNSET        # when asked for


class FunctionCall(msgspec.Struct):
    """A function's name and its arguments, JSON as text."""
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """One call that the model asks for."""
    id: str
    function: FunctionCall
    type: str = "function"


class AnswerMessage(msgspec.Struct, omit_defaults=True):
    """The text of a chat choice. `content` is null when there are only tool calls."""
    role: str
    content: str | None
    refusal: str | None = msgspec.field(default_factory=lambda: None)   # always written
    tool_calls: list[ToolCall] = []
    reasoning_content: str | None = None        # what the model thought before it answered


class ChatChoice(msgspec.Struct):
    """One choice of a chat answer. `stop_reason` is the stop string or token id that ended it, as in vLLM."""
    index: int
    message: AnswerMessage
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET        # when asked for


class CompletionChoice(msgspec.Struct):
    """One choice of a completion."""
    index: int
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET     # these three when asked for
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatResponse(msgspec.Struct):
    """The answer of POST /v1/chat/completions without stream."""
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET     # these two when asked for
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct):
    """The answer of POST /v1/completions without stream."""
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    object: str = "text_completion"
