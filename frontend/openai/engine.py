"""What the HTTP surface needs from an engine. AsyncLLM is one; the tests bring a fake.

Knows no HTTP and no implementation.
"""
from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from frontend.outputs import OutputKind, PoolingRequestOutput, RequestOutput
from frontend.request_stream import Sink
from frontend.tools.formats import ToolFormat
from ipc.sampling_params import SamplingParams


class TokenizerLike(Protocol):
    """Text to int32 little-endian bytes and back."""

    def encode(self, text: str, add_special_tokens: bool) -> bytes: ...

    def decode(self, token_ids: Sequence[int] | bytes, skip_special_tokens: bool = True) -> str: ...

    @property
    def special_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def id_to_token(self, token_id: int) -> str | None: ...


class EngineLike(Protocol):
    """The engine as the endpoints see it.

    `generate` validates against the model and raises RequestError, OverloadedError, EngineDeadError or
    RequestFailedError; closing the generator aborts the request. Everything but `status` may be called only when
    `status()["ready"]` is true.
    """
    served_model_name: str
    max_model_len: int
    vocab_size: int                             # width of the logits: ids are 0 to vocab_size - 1
    created: int                                # Unix time of the start

    @property
    def tokenizer(self) -> TokenizerLike: ...

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes tool calls."""
        ...

    @property
    def has_reasoning(self) -> bool:
        """Whether the model's template knows tags around thoughts."""
        ...

    @property
    def has_thinking_switch(self) -> bool:
        """Whether the template has the variable enable_thinking."""
        ...

    def generate(self, prompt: str | list[int] | bytes, sampling_params: SamplingParams, *,
                 request_id: str | None = None, output_kind: OutputKind = "cumulative", priority: int = 0,
                 add_special_tokens: bool = True, cache_salt: str = "",
                 sink: Sink | None = None) -> AsyncGenerator[RequestOutput, None]: ...

    async def encode(self, prompt: str | list[int] | bytes, *, pooling: str = "last", normalize: bool = True,
                     request_id: str | None = None, priority: int = 0, add_special_tokens: bool = True,
                     cache_salt: str = "") -> PoolingRequestOutput: ...

    def render_chat(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
                    documents: list[dict[str, Any]] | None = None, reasoning_effort: str | None = None,
                    add_generation_prompt: bool = True, continue_final_message: bool = False,
                    chat_template_kwargs: dict[str, Any] | None = None) -> bytes:
        """Token ids as int32 little-endian bytes. Called from a thread for long chats."""
        ...

    def status(self) -> dict[str, Any]:
        """"ready": bool; "dead": bool, true once the engine cannot come back; "phase": str; "reason": str."""
        ...

    @property
    def is_paused(self) -> bool: ...

    def pause(self) -> None:
        """New requests wait; running ones go on."""
        ...

    def resume(self) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def dump_recording(self) -> str:
        """Raises ValueError when there is no recorder."""
        ...

    async def sleep(self, level: int = 1) -> None:
        """Raises ValueError when it sleeps already."""
        ...

    async def wake_up(self) -> None: ...

    async def is_sleeping(self) -> bool: ...

    def default_max_tokens(self, prompt_len: int) -> int:
        """Tokens that fit behind a prompt of this length; below 1 if the prompt itself does not fit."""
        ...
