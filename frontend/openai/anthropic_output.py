"""The fields `output_config` and `output_format` of the Messages API: the form of the answer, and how much to think.

`output_format` is the older place of `output_config.format`. Knows no engine.
"""
from __future__ import annotations

from typing import Any

from ipc.errors import RequestError
from ipc.structured_outputs import StructuredOutputs

FIELDS = ("effort", "format")


def read_output(config: dict[str, Any] | None, output_format: dict[str, Any] | None
                ) -> tuple[StructuredOutputs | None, str | None]:
    """(form of the answer, reasoning_effort). Raises RequestError that names the part."""
    given = {name: value for name, value in (config or {}).items() if value is not None}
    unknown = next((name for name in given if name not in FIELDS), None)
    if unknown is not None:
        raise RequestError(f"output_config.{unknown[:60]} is not supported; known are {', '.join(FIELDS)}",
                           "output_config")
    effort = given.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError("output_config.effort must be text", "output_config.effort")
    forms = {"output_config.format": given.get("format"), "output_format": output_format}
    found = [(where, value) for where, value in forms.items() if value is not None]
    if len(found) > 1:
        raise RequestError("output_config.format and output_format are both given; give one of them", "output_format")
    return (_form(*found[0]) if found else None), effort


def _form(where: str, value: Any) -> StructuredOutputs:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind != "json_schema" or not isinstance(value.get("schema"), dict):
        raise RequestError(f'{where} must be {{"type": "json_schema", "schema": {{...}}}}', where)
    try:
        return StructuredOutputs(json=value["schema"])
    except RequestError as error:
        raise RequestError(f"{where}: {error}", where) from None
