"""The field `thinking` of the Messages API: whether the model thinks, and whether that is shown.

"adaptive", or nothing, leaves it to the model; "enabled" and "disabled" set the chat template's variable
enable_thinking where it has that. A budget is a target, which nothing cuts thoughts off at: max_tokens is the limit.
Knows no engine.
"""
from __future__ import annotations

from typing import Any

from ipc.errors import RequestError

KINDS = ("adaptive", "enabled", "disabled")
FIELDS = ("type", "budget_tokens", "display")
DISPLAYS = (None, "summarized", "omitted")
SWITCH = "enable_thinking"


def read_thinking(thinking: dict[str, Any] | None, template_kwargs: dict[str, Any] | None, *, thinks: bool,
                  has_switch: bool, max_tokens: int | None) -> tuple[bool, dict[str, Any] | None]:
    """(thoughts are shown, variables of the chat template). A variable that the request sets itself stays.

    thinks: the model's template knows tags around thoughts. Raises RequestError that names the part.
    """
    given = {"type": "adaptive"} if thinking is None else thinking
    kind = given.get("type")
    if kind not in KINDS:
        raise RequestError(f"thinking.type is {str(kind)[:60]!r}; known are {', '.join(KINDS)}", "thinking")
    unknown = next((name for name in given if name not in FIELDS), None)
    if unknown is not None:
        raise RequestError(f"thinking.{unknown[:60]} is not supported; known are {', '.join(FIELDS)}", "thinking")
    if given.get("display") not in DISPLAYS:
        raise RequestError(f"thinking.display is {str(given['display'])[:60]!r}; known are summarized and omitted",
                           "thinking")
    if kind == "enabled":
        _check_budget(given.get("budget_tokens"), max_tokens)
        if not thinks and not has_switch:
            raise RequestError("thinking.type is 'enabled', and this model's chat template knows no thoughts; use "
                               "adaptive or disabled", "thinking")
    elif given.get("budget_tokens") is not None:
        raise RequestError(f"thinking.budget_tokens goes with type enabled, not {kind}", "thinking")
    kwargs = template_kwargs
    if has_switch and kind != "adaptive":
        kwargs = {SWITCH: kind == "enabled"} | (template_kwargs or {})
    return kind != "disabled" and given.get("display") != "omitted", kwargs


def _check_budget(budget: Any, max_tokens: int | None) -> None:
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise RequestError(f"thinking.budget_tokens is {str(budget)[:60]}; it must be an integer above 0", "thinking")
    if max_tokens is not None and budget >= max_tokens:
        raise RequestError(f"thinking.budget_tokens is {budget}, which must be below max_tokens {max_tokens}",
                           "thinking")
