"""Chat messages to one prompt string, by the model's own Jinja template.

The template is part of a model file, so it is untrusted code: it runs in Jinja's immutable sandbox, and on top of that
its loops are counted, its strings and its output are capped. Requests cannot bring a template, only values for its
variables. Renders exactly what the model's authors rendered (whitespace rules, JSON without HTML escaping); knows
nothing of tokens or requests.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from ipc.errors import ConfigError, RequestError

MAX_EXTRA_CHARS = 1_000_000          # of output, or of one string inside the template, beyond the size of the input
MAX_LOOP_ROUNDS = 1_000_000          # of all loops of one rendering together; about a second
_ROUNDS, _SIZED = "threefold_counted_", "threefold_sized_"
_MARK = "\ue000continue\ue000"       # private-use characters: no tokenizer's training text has them in this order
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception",
             "strftime_now", "self", "loop", "caller", "varargs", "kwargs", _ROUNDS, _SIZED}


class ChatTemplate:
    """The templates of one model, compiled. Immutable; safe to use from several threads."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str] | None = None) -> None:
        """`templates` by name: "default", and "tool_use" if tools have one of their own. Empty: `render` refuses.

        Raises ConfigError for a template that is no Jinja.
        """
        self._templates = {name: _compile(source) for name, source in templates.items()}
        self._sources = dict(templates)
        self._special_tokens = dict(special_tokens or {})

    @property
    def sources(self) -> list[str]:
        """The templates as written."""
        return list(self._sources.values())

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        reasoning_effort: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt for `messages`. Encode it without adding special tokens: the template wrote them.

        continue_final_message leaves the last message open, so that the model goes on with its text. reasoning_effort
        becomes the template's variable of that name; where it only has enable_thinking, "none" turns that off.
        Raises RequestError for whatever the template or this function cannot do with the request.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise RequestError("this model has no chat template, so chat completions are not possible; "
                               "/v1/completions works", "messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError("continue_final_message and add_generation_prompt exclude each other: set "
                               "add_generation_prompt to false", "continue_final_message")
        extra = _check_kwargs(chat_template_kwargs or {}, self._special_tokens)
        if reasoning_effort is not None:
            extra = _effort(reasoning_effort, self._sources[name]) | extra
        if documents and "documents" not in self._sources[name]:
            raise RequestError("documents are given, and this model's chat template shows none; put their text into a "
                               "message", "documents")
        keeps_none = "none" in self._sources[name].lower()
        texts = [_normalise(message, index, keeps_none) for index, message in enumerate(messages)]
        if not texts:
            raise RequestError("messages is empty; send at least one", "messages")
        if continue_final_message:
            if not isinstance(texts[-1]["content"], str):
                raise RequestError("continue_final_message needs a last message with text content", "messages")
            texts[-1]["content"] += _MARK + " "      # the space shows whether the template trims
        variables: dict[str, Any] = {
            **self._special_tokens, **extra, "messages": texts, "tools": tools or None, "documents": documents or None,
            "add_generation_prompt": add_generation_prompt,
        }
        prompt = _run(template, variables)
        return _cut_at_mark(prompt) if continue_final_message else prompt


def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    limit = MAX_EXTRA_CHARS + _size(variables)
    guards = {_ROUNDS: functools.partial(_counted, _Budget(MAX_LOOP_ROUNDS)),
              _SIZED: functools.partial(_sized, limit)}
    pieces, length = [], 0
    try:
        for piece in template.generate(variables | guards):
            length += len(piece)
            if length > limit:
                raise jinja2.TemplateError(f"its output is longer than {limit} characters")
            pieces.append(piece)
    except Exception as error:           # the template is foreign code: any exception of it is about this request
        raise RequestError(f"the model's chat template refused the request: {error or type(error).__name__}",
                           "messages") from error
    return "".join(pieces)


def _cut_at_mark(prompt: str) -> str:
    start = prompt.rfind(_MARK)
    if start < 0:
        raise RequestError("continue_final_message: the model's chat template does not show the last message's text",
                           "messages")
    kept = prompt[:start]
    return kept if prompt.startswith(" ", start + len(_MARK)) else kept.rstrip()


# -- what a request may send ------------------------------------------------------------------------------------------

def _normalise(message: dict[str, Any], index: int, keeps_none: bool) -> dict[str, Any]:
    """A copy in the form templates expect: text content as one string, tool call arguments as an object.

    Content that is null becomes "", because most templates add it to a string; only beside tool calls, and if the
    template knows the word none, it stays null.
    """
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} must be an object with a role", where)
    result = dict(message)
    content = message.get("content")
    tool_calls = message.get("tool_calls")
    if isinstance(content, list):
        content = "\n".join(_part_text(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    elif content is None:
        content = None if tool_calls and keeps_none else ""
    elif not isinstance(content, str):
        raise RequestError(f"{where}.content must be a string, a list of parts or null, not {type(content).__name__}",
                           f"{where}.content")
    result["content"] = content
    if tool_calls:
        result["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(tool_calls)]
    elif "tool_calls" in result:
        del result["tool_calls"]         # templates test whether the key is there, clients send null
    return result


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise RequestError(f"{where}: parts of type {kind!r} are not supported; send text parts only", where)
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}.text must be a string", where)
    return str(part["text"])


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Clients send arguments as JSON text; templates write them with tojson, which would quote the text again."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError(f"{where} must be an object with a function", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise RequestError(f"{where}.function.arguments is no JSON: {error}", where) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _check_kwargs(kwargs: dict[str, Any], special_tokens: Mapping[str, str]) -> dict[str, Any]:
    """Values a request gives to template variables: plain data under names that are not already taken."""
    for name, value in kwargs.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise RequestError(f"chat_template_kwargs: {name!r} is no variable name", "chat_template_kwargs")
        if name in _RESERVED or name in special_tokens or name in _environment().globals:
            raise RequestError(f"chat_template_kwargs: {name!r} cannot be set there", "chat_template_kwargs")
        if not _is_plain(value, depth=4):
            raise RequestError(f"chat_template_kwargs: {name!r} must be text, a number, true, false, null, or lists "
                               f"and objects of those (at most 4 deep)", "chat_template_kwargs")
    return kwargs


def has_thinking_switch(source: str) -> bool:
    """Whether the template's variable enable_thinking says if the model thinks."""
    return re.search(r"\benable_thinking\b", source) is not None


def _effort(effort: str, source: str) -> dict[str, Any]:
    """The template's variables for a reasoning_effort. Raises RequestError where it has none for it."""
    if re.search(r"\breasoning_effort\b", source):
        return {"reasoning_effort": effort}
    has_switch = has_thinking_switch(source)
    if has_switch and effort == "none":
        return {"enable_thinking": False}
    fix = "leave it out, or send \"none\", which turns thoughts off" if has_switch else "leave it out"
    raise RequestError(f"reasoning_effort is {effort[:60]!r}; this model's chat template has no such levels: {fix}",
                       "reasoning_effort")


def _is_plain(value: Any, depth: int) -> bool:
    if value is None or isinstance(value, (str, bool, int, float)):
        return True
    if depth == 0:
        return False
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item, depth - 1) for key, item in value.items())
    return isinstance(value, list) and all(_is_plain(item, depth - 1) for item in value)


def _size(value: Any) -> int:
    """Characters of all text inside `value`, and one for every other thing."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _size(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(_size(item) for item in value)
    return 1


# -- the environment --------------------------------------------------------------------------------------------------

class _Budget:
    __slots__ = ("rounds",)

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds


def _counted(budget: _Budget, items: Iterable[Any]) -> Iterator[Any]:
    """What every `for` iterates over. Jinja limits one range(); nested loops multiply, so all rounds count together."""
    for item in items:
        budget.rounds -= 1
        if budget.rounds < 0:
            raise jinja2.TemplateError(f"it loops more than {MAX_LOOP_ROUNDS} times")
        yield item


def _sized(limit: int, value: Any) -> Any:
    """Every result of `+` and `~`: a string doubled in a loop would fill the memory in 40 rounds."""
    if isinstance(value, (str, list, tuple)) and len(value) > limit:
        raise jinja2.TemplateError(f"it builds a value longer than {limit}")
    return value


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with the two operators that can make something huge in one go checked first."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            if not all(isinstance(side, (int, float)) and abs(side) <= 10_000 for side in (left, right)):
                raise jinja2.TemplateError("it raises to a power beyond 10000")
        elif isinstance(left, int) != isinstance(right, int):        # a sequence times a number
            sequence, count = (right, left) if isinstance(left, int) else (left, right)
            if not isinstance(sequence, float) and len(sequence) * count > MAX_EXTRA_CHARS:
                raise jinja2.TemplateError(f"it builds a value longer than {MAX_EXTRA_CHARS}")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; for a prompt it means nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:
    """JSON as the models saw it in training: Jinja's own filter escapes <, >, & and ' for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.cache
def _environment() -> _Environment:
    extensions = ["jinja2.ext.loopcontrols", _Generation]
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    filters: dict[str, Callable[..., Any]] = environment.filters
    filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@functools.lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    """Parse, put the guards around loops and additions, compile. 40 ms for a long template, hence the cache."""
    environment = _environment()
    try:
        tree = _Guard().visit(environment.parse(source))
        code = environment.compile(tree)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the model's chat template is no Jinja: line {error.lineno}: {error.message}") from error
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _Guard(jinja2.visitor.NodeTransformer):
    """Wraps the iterable of every loop and the result of every addition in a call of a guard."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._call(_ROUNDS, node.iter)
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        self.generic_visit(node)
        return self._call(_SIZED, node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call(_SIZED, node)

    @staticmethod
    def _call(guard: str, value: nodes.Node) -> nodes.Call:
        name = nodes.Name(guard, "load", lineno=value.lineno)
        call = nodes.Call(name, [value], [], None, None, lineno=value.lineno)
        call.set_environment(_environment())
        return call
