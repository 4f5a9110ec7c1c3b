"""A conversation cut to what fits: the oldest messages are left out, those of the system stay.

A result of a tool whose call is left out goes with it. Knows no template and no engine.
"""
from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Messages = list[dict[str, Any]]

ANSWER_SHARE = 8                                # of the context: room for an answer without a limit of its own


async def fitting_prompt(render: Callable[[Messages], Awaitable[bytes]], messages: Messages, max_model_len: int,
                         max_tokens: int | None) -> bytes:
    """The prompt (int32 ids) of as many of the newest messages as fit beside the answer. The newest one always stays,
    so the prompt may be too long still."""
    room = max_model_len - (max_model_len // ANSWER_SHARE if max_tokens is None else max_tokens)
    prompt = await render(messages)
    if len(prompt) // 4 <= room:
        return prompt
    cuts = beginnings(messages)
    low, high = 0, len(cuts) - 1                # the first cut that fits; the last one if none does
    while low < high:
        middle = (low + high) // 2
        if len(await render(kept(messages, cuts[middle]))) // 4 <= room:
            high = middle
        else:
            low = middle + 1
    return await render(kept(messages, cuts[low]))


def beginnings(messages: Messages) -> list[int]:
    """Where a shorter conversation may begin, longest first: with what the user says, as some templates insist, and
    behind the last of that (a model that works with tools alone, say) with what the assistant says."""
    talk = [index for index, message in enumerate(messages) if message["role"] != "system"]
    last = max((index for index in talk if messages[index]["role"] == "user"), default=-1)
    return [index for index in talk[1:] if messages[index]["role"] == "user"
            or (index > last and messages[index]["role"] != "tool")] or talk[:1] or [0]


def kept(messages: Messages, begin: int) -> Messages:
    """Messages from `begin` on, and what the system said before."""
    return [message for index, message in enumerate(messages) if index >= begin or message["role"] == "system"]
