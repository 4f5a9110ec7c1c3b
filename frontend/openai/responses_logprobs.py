"""Log-probabilities of a response's text: one entry for each token that adds to it, none for thoughts. Knows no engine.
"""
from __future__ import annotations

from collections.abc import Sequence

from frontend.openai.chat_parts import ChoiceParts
from frontend.openai.logprobs import ChoiceLogprobs, TokenLogprob
from frontend.outputs import CompletionOutput
from ipc.errors import RequestError

WANTED = "message.output_text.logprobs"
# More of what OpenAI's own tools put out, of which there is none here, and of thoughts, which are not encrypted.
WITHOUT_EFFECT = ("reasoning.encrypted_content", "web_search_call.results", "web_search_call.action.sources",
                  "file_search_call.results", "code_interpreter_call.outputs", "message.input_image.image_url",
                  "computer_call_output.output.image_url")


def num_top_logprobs(include: Sequence[str] | None, top_logprobs: int | None, has_tools: bool) -> int | None:
    """Alternatives for each token of the text; None: no log-probabilities. Raises RequestError."""
    for name in include or ():
        if name != WANTED and name not in WITHOUT_EFFECT:
            known = ", ".join((WANTED, *WITHOUT_EFFECT))
            raise RequestError(f"include has {name[:60]!r}; known are {known}", "include")
    if WANTED not in (include or ()) and not top_logprobs:
        return None
    if has_tools:
        field = "include" if WANTED in (include or ()) else "top_logprobs"
        raise RequestError(f"{field} asks for log-probabilities, which this server does not give beside tools; leave "
                           "one of them out", field)
    return top_logprobs or 0


class TextLogprobs:
    """Of one answer; feed it each piece after `parts` was fed the text of it."""

    def __init__(self, writer: ChoiceLogprobs, parts: ChoiceParts) -> None:
        self._writer, self._parts = writer, parts
        self._token_ids: list[int] = []         # until the answer begins
        self._held: list[TokenLogprob] = []
        self._has_begun = parts.reasoning is None

    def feed(self, choice: CompletionOutput) -> list[TokenLogprob]:
        """Entries of the text that are new. Those of the blanks behind thoughts belong to neither."""
        is_stop_token = choice.finish_reason == "stop" and isinstance(choice.stop_reason, int)
        stop_token = choice.token_ids[-1] if is_stop_token and choice.token_ids else None
        found = self._writer.chat(choice.token_ids, list(choice.logprobs or ()), stop_token).content
        if self._has_begun:
            return [entry for entry in found if entry.bytes]
        self._held += found
        self._token_ids += choice.token_ids
        splitter = self._parts.reasoning
        if splitter is None or not splitter.has_answer:
            return []
        shown = self._held[self._parts.reasoning_tokens(self._token_ids):]
        if splitter.has_thoughts:
            while shown and not bytes(shown[0].bytes).strip():
                del shown[0]
        self._has_begun = bool(shown)
        return [entry for entry in shown if entry.bytes]
