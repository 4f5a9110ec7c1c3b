"""instructor: a pydantic object by JSON schema and by tools."""

from __future__ import annotations

import importlib.metadata
import sys

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

URL, MODEL = sys.argv[1], sys.argv[2]


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")  # else a small model invents properties until its tokens are used up
    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=99_999_999)


def main() -> None:
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        with openai.OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
            made = instructor.from_openai(client, mode=mode).chat.completions.create(
                model=MODEL, response_model=City, max_tokens=100, temperature=0, max_retries=1,
                messages=[{"role": "user", "content": "Paris has 2 million inhabitants. Describe it."}])
        assert isinstance(made, City), made
    print(f"instructor {importlib.metadata.version('instructor')}: ok")


main()
