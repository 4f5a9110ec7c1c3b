"""Outputs of a real model under JSON schemas in the style of JSON-Schema-Test-Suite: each must parse and validate.

    python launch.py bench schemas [--model smollm2-135m] [--each 4] [--max-tokens 300]

Temperature 1, 32 requests at a time. A schema that the grammar library does not take is counted apart, and so is an
output that the length ended. One JSON object last; status 1 if a finished output does not validate.
"""
from __future__ import annotations

import argparse
import asyncio
import datetime
import json
from typing import Any

import jsonschema

from bench.schema_corpus import corpus
from frontend import AsyncLLM, SamplingParams
from ipc.errors import RequestError
from ipc.option_help import OptionParser
from ipc.structured_outputs import StructuredOutputs

MAX_RUNNING = 32
FORMATS = jsonschema.FormatChecker(())
FORMATS.checkers = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)


@FORMATS.checks("time", ValueError)
def is_time(text: object) -> bool:
    """RFC 3339's full-time, which the library takes for the time without an offset of draft 3."""
    return not isinstance(text, str) or is_date_time("1970-01-01T" + text)


@FORMATS.checks("date-time", ValueError)
def is_date_time(text: object) -> bool:
    """RFC 3339's date-time, a leap second included."""
    if not isinstance(text, str):
        return True
    moment = datetime.datetime.fromisoformat(text.upper().replace(":60", ":59", 1))
    return text[10:11] in "Tt" and text[13:14] == ":" and text[16:17] == ":" and moment.tzinfo is not None


def problem_with(schema: Any, text: str) -> str:
    """Why the text is not of the schema; empty: it is."""
    try:
        jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return ""


async def ask(llm: AsyncLLM, schema: Any, seed: int, max_tokens: int) -> tuple[str, str | None]:
    """(text, finish_reason); RequestError: the library does not take the schema."""
    params = SamplingParams(max_tokens=max_tokens, seed=seed,
                            structured_outputs=StructuredOutputs(json=json.dumps(schema)))
    prompt = [{"role": "user", "content": "Give me a short example as JSON."}]
    text, reason = "", None
    async for output in llm.chat(prompt, params, output_kind="final"):
        text, reason = output.outputs[0].text, output.outputs[0].finish_reason
    return text, reason


async def run(model: str, schemas: dict[str, Any], each: int, max_tokens: int, **options: Any) -> dict[str, Any]:
    """Figures, and what was wrong."""
    refused: dict[str, str] = {}
    wrong: list[str] = []
    num_finished = num_cut = 0
    places = asyncio.Semaphore(MAX_RUNNING)

    async def placed(schema: Any, seed: int) -> tuple[str, str | None]:
        async with places:
            return await ask(llm, schema, seed, max_tokens)
    async with AsyncLLM(model=model, max_model_len=2048, **options) as llm:
        jobs = {(name, seed): asyncio.create_task(placed(schema, seed))
                for name, schema in schemas.items() for seed in range(each)}
        for (name, seed), job in jobs.items():
            try:
                text, reason = await job
            except RequestError as error:
                refused[name] = str(error)[:160]
                continue
            if reason != "stop":
                num_cut += 1
                continue
            num_finished += 1
            problem = problem_with(schemas[name], text)
            if problem:
                wrong.append(f"{name} (seed {seed}): {problem}: {text[:200]!r}")
    return {"benchmark": "schemas", "model": model, "num_schemas": len(schemas), "num_refused": len(refused),
            "num_finished": num_finished, "num_ended_by_length": num_cut, "num_wrong": len(wrong), "wrong": wrong,
            "refused": refused}


def main(argv: list[str] | None = None) -> int:
    """Run and judge."""
    parser = OptionParser(prog="launch.py bench schemas", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--each", type=int, default=4, help="outputs of every schema")
    parser.add_argument("--max-tokens", type=int, default=300)
    args = parser.parse_args(argv)
    found = asyncio.run(run(args.model, corpus(), args.each, args.max_tokens))
    for line in found["wrong"]:
        print("WRONG", line)
    for name, reason in found.pop("refused").items():
        print(f"refused  {name}: {reason}")
    print(json.dumps(found))
    return int(found["num_wrong"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
