"""litellm as hosted_vllm: completion, stream, tools, errors."""

from __future__ import annotations

import importlib.metadata
import sys

import litellm

URL, MODEL = sys.argv[1], sys.argv[2]
HELLO = [{"role": "user", "content": "Name a colour."}]
SETTINGS = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "messages": HELLO,
            "max_tokens": 8, "temperature": 0}


def main() -> None:
    answer = litellm.completion(**SETTINGS)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in litellm.completion(**SETTINGS, stream=True))
    assert text == answer.choices[0].message.content and answer.usage.completion_tokens == 8
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    called = litellm.completion(**SETTINGS | {"max_tokens": 60}, tools=[tool], tool_choice="required")
    assert called.choices[0].message.tool_calls[0].function.name == "now"
    try:
        litellm.completion(**SETTINGS | {"model": "hosted_vllm/nobody"})
        raise AssertionError("an unknown model is served")
    except litellm.NotFoundError as error:
        assert "nobody" in str(error)
    print(f"litellm {importlib.metadata.version('litellm')}: ok")


main()
