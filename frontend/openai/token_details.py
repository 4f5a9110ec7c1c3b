"""What a call may ask to know about tokens besides their text: ids (`return_token_ids`) and the prompt's
log-probabilities (`prompt_logprobs`). Names and places are vLLM's: a chat answer has those of the prompt once, a
completion in each choice. Knows no engine.
"""
from __future__ import annotations

import msgspec

from frontend.openai.logprobs import value_of
from frontend.outputs import CompletionOutput, RequestOutput

_encode = msgspec.json.Encoder().encode


class PromptLogprob(msgspec.Struct):
    """Of one token at one position of a prompt."""
    logprob: float
    rank: int                                   # among all tokens, 1: the likeliest
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


def prompt_logprobs_of(output: RequestOutput, is_asked: bool) -> PromptLogprobs | msgspec.UnsetType:
    """One entry per prompt token, by token id; the first has none."""
    if not is_asked:
        return msgspec.UNSET
    return [None if entry is None else {str(token): PromptLogprob(value_of(item), item.rank, item.decoded_token)
                                        for token, item in entry.items()}
            for entry in output.prompt_logprobs or []]


def prompt_ids_of(output: RequestOutput, is_asked: bool) -> list[int] | msgspec.UnsetType:
    """As the engine read them."""
    return output.prompt_token_ids if is_asked else msgspec.UNSET


def ids_of(choice: CompletionOutput, is_asked: bool) -> list[int] | msgspec.UnsetType:
    """Of the output alone, also where `echo` put the prompt in front."""
    return choice.token_ids[choice.num_echoed:] if is_asked else msgspec.UNSET


def members(choice: CompletionOutput, logprobs: bytes | None) -> bytes:
    """JSON of a chunk's log-probabilities with the member token_ids behind it."""
    return (logprobs or b"null") + b',"token_ids":' + _encode(choice.token_ids[choice.num_echoed:])


def prompt_member(output: RequestOutput) -> bytes:
    """The member prompt_token_ids, with the comma before it."""
    return b',"prompt_token_ids":' + _encode(output.prompt_token_ids)
