"""Anthropic's Python client on /v1/messages: message, stream, system, count_tokens, errors."""

from __future__ import annotations

import sys
import typing

import anthropic
import pydantic

URL, MODEL = sys.argv[1], sys.argv[2]
HELLO = [{"role": "user", "content": "Name a colour."}]
GREEDY = {"temperature": 0}    # newer clients have no argument for it


class Colour(pydantic.BaseModel):
    """What is asked for."""

    name: typing.Literal["red", "green", "blue"]


def main() -> None:
    with anthropic.Anthropic(base_url=URL, api_key="none") as client:
        answer = client.messages.create(model=MODEL, max_tokens=8, messages=HELLO, system="Be brief.",
                                        extra_body=GREEDY)
        assert answer.role == "assistant" and answer.content[0].type == "text" and answer.usage.output_tokens <= 8
        with client.messages.stream(model=MODEL, max_tokens=8, messages=HELLO, system="Be brief.",
                                    extra_body=GREEDY) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        assert text == answer.content[0].text == last.content[0].text, (text, answer)
        assert last.stop_reason == answer.stop_reason
        counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="Be brief.")
        assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
        end = text.strip()[-1]                  # the greedy answer has it
        stopped = client.messages.create(model=MODEL, max_tokens=8, messages=HELLO, system="Be brief.",
                                         stop_sequences=[end], extra_body=GREEDY)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", end), (stopped, text)
        if hasattr(client.messages, "parse"):       # newer clients
            parsed = client.messages.parse(model=MODEL, max_tokens=100, messages=HELLO, output_format=Colour,
                                           extra_body=GREEDY)
            assert isinstance(parsed.parsed_output, Colour), parsed
        plain = client.messages.create(model=MODEL, max_tokens=8, messages=HELLO, system="Be brief.",
                                       thinking={"type": "disabled"}, extra_body=GREEDY)
        assert plain.content[0].text == text, plain
        try:
            client.messages.create(model="nobody", max_tokens=8, messages=HELLO)
            raise AssertionError("an unknown model is served")
        except anthropic.NotFoundError as error:
            assert "nobody" in str(error)
        try:
            client.messages.create(model=MODEL, max_tokens=8, messages=HELLO, extra_body={"temperature": -1})
            raise AssertionError("temperature -1 is taken")
        except anthropic.BadRequestError as error:
            assert "temperature" in str(error)
    print(f"anthropic {anthropic.__version__}: ok")


main()
