"""langchain-openai: invoke, stream, batch, tools, structured output, embeddings."""

from __future__ import annotations

import importlib.metadata
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

URL, MODEL = sys.argv[1], sys.argv[2]


class City(BaseModel):
    """A city."""

    name: str
    country: str


@tool
def weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


def main() -> None:
    chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", temperature=0, max_tokens=40)
    answer = chat.invoke("Name a colour.")
    assert "".join(str(piece.content) for piece in chat.stream("Name a colour.")) == answer.content
    assert len(chat.batch(["One", "Two", "Three"])) == 3
    assert isinstance(chat.with_structured_output(City).invoke("Describe Paris."), City)
    called = chat.bind_tools([weather], tool_choice="weather").invoke("Weather in Paris?")
    assert called.tool_calls[0]["name"] == "weather"
    vectors = OpenAIEmbeddings(model=MODEL, base_url=f"{URL}/v1", api_key="none",
                               check_embedding_ctx_length=False).embed_documents(["a", "b"])
    assert len(vectors) == 2 and abs(sum(x * x for x in vectors[0]) - 1) < 1e-3
    print(f"langchain-openai {importlib.metadata.version('langchain-openai')}: ok")


main()
