"""What the Responses and the Messages API share: a conversation made into one engine request.

They differ from chat completions in names and shapes, not in what is computed. Knows no HTTP.
"""
from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from frontend.openai.chat import make_parts, render, with_tools
from frontend.openai.chat_parts import ChoiceParts
from frontend.openai.engine import EngineLike
from frontend.openai.truncation import fitting_prompt
from frontend.outputs import OutputKind, RequestOutput
from frontend.tools.request import ToolUse
from ipc.errors import RequestError
from ipc.sampling_params import SamplingParams, check_priority
from ipc.structured_outputs import StructuredOutputs

_SAMPLING_NAMES = frozenset(SamplingParams.__struct_fields__) - {"structured_outputs"}    # comes as `form`


@dataclasses.dataclass(frozen=True, slots=True)
class ChatCall:
    """One request, ready to run."""
    engine: EngineLike
    prompt: bytes                               # int32 token ids
    params: SamplingParams
    id: str
    priority: int
    cache_salt: str
    tools: ToolUse | None = None

    def run(self, kind: OutputKind) -> AsyncGenerator[RequestOutput, None]:
        """Its outputs."""
        return self.engine.generate(self.prompt, self.params, request_id=self.id, output_kind=kind,
                                    priority=self.priority, add_special_tokens=False, cache_salt=self.cache_salt)

    def parts(self, shows_reasoning: bool = True) -> ChoiceParts:
        """What splits its text into thoughts, content and calls."""
        parts_of = make_parts(self.engine, self.params, self.tools, self.prompt, shows_reasoning)
        return ChoiceParts() if parts_of is None else parts_of(0)


async def make_call(engine: EngineLike, request: msgspec.Struct, messages: list[dict[str, Any]], num_bytes: int,
                    call_id: str, cache_salt: str, renamed: Mapping[str, str], *,
                    continue_final_message: bool = False, tools: ToolUse | None = None,
                    form: StructuredOutputs | None = None, reasoning_effort: str | None = None,
                    logprobs: int | None = None, drops_oldest: bool = False) -> ChatCall:
    """Template, tokens and checked parameters. `form`: of the output; `renamed`: the API's names for sampling
    parameters -> ours; drops_oldest: leave out old messages until the prompt fits.

    Without a limit of its own the answer may fill what the prompt leaves. Raises RequestError with the API's names.
    """
    priority = check_priority(getattr(request, "priority", None))
    params = _params(request, renamed, logprobs)
    if form is not None:
        params = params.replace(structured_outputs=form)
    if tools is not None:
        params = with_tools(params, tools)

    async def prompt_of(messages: list[dict[str, Any]]) -> bytes:
        return await render(engine, messages, num_bytes, continue_final_message=continue_final_message,
                            chat_template_kwargs=getattr(request, "chat_template_kwargs", None),
                            tools=None if tools is None else tools.shown, reasoning_effort=reasoning_effort)
    try:
        if drops_oldest:
            prompt = await fitting_prompt(prompt_of, messages, engine.max_model_len, params.max_tokens)
        else:
            prompt = await prompt_of(messages)
    except RequestError as exc:
        raise theirs(exc, renamed) from None
    if params.max_tokens is None:
        room = engine.default_max_tokens(len(prompt) // 4)
        if room >= 1:                           # else the engine refuses the prompt, with both numbers
            params = params.replace(max_tokens=room)
    return ChatCall(engine, prompt, params, call_id, priority, cache_salt, tools)


def _params(request: msgspec.Struct, renamed: Mapping[str, str], logprobs: int | None) -> SamplingParams:
    given: dict[str, Any] = {"max_tokens": None}
    for field in request.__struct_fields__:
        name = renamed.get(field, field)
        value = getattr(request, field)
        if name in _SAMPLING_NAMES and value is not None:
            given[name] = value
    try:
        return SamplingParams(**{**given, "logprobs": logprobs})
    except RequestError as exc:
        raise theirs(exc, renamed) from None


def theirs(exc: RequestError, renamed: Mapping[str, str]) -> RequestError:
    """The same with the API's name of the field."""
    name = {ours: field for field, ours in renamed.items()}.get(exc.param or "")
    return exc if name is None else RequestError(str(exc).replace(exc.param or "", name, 1), name)


def text_of(content: Any, where: str, kinds: tuple[str, ...]) -> str:
    """The text of a message's content: a string, or parts of these kinds. Raises RequestError that names the part."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where} must be text or a list of parts", where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise RequestError(f"{where}[{index}].type is {str(kind)[:60]!r}; this server takes {', '.join(kinds)}",
                               f"{where}[{index}].type")
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(f"{where}[{index}].text must be text", f"{where}[{index}].text")
        texts.append(text)
    return "\n".join(texts)


def function_tools(tools: list[dict[str, Any]] | None, kind: str, fields: dict[str, str],
                   default: str | None = None) -> list[dict[str, Any]] | None:
    """Tools in the shape of chat completions, where a function's fields lie one level deeper.

    `kind`: the only type taken; `default`: the type of a tool that names none; `fields`: ours -> theirs. Raises
    RequestError that names the tool.
    """
    if tools is None:
        return None
    found = []
    for index, tool in enumerate(tools):
        theirs = tool.get("type", default)
        if theirs != kind:
            raise RequestError(f"tools[{index}].type is {str(theirs)[:60]!r}; this server takes {kind}",
                               f"tools[{index}].type")
        inner = {name: tool[field] for name, field in fields.items() if tool.get(field) is not None}
        found.append({"type": "function", "function": inner})
    return found
