"""Grammars are tried out in a process that may be killed; whatever they do to it, the answer is one refusal."""
from __future__ import annotations

import asyncio
import os
import signal
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from bench.hostile_grammars import harmless, hostile, sized
from frontend.grammar_check import GrammarChecker
from ipc.errors import OverloadedError, RequestError
from ipc.structured_outputs import StructuredOutputs

GOOD: list[dict[str, Any]] = [
    dict(json='{"type": "object", "properties": {"a": {"type": "integer"}}}'), dict(json_object=True),
    dict(regex="[a-z]+/[0-9]{1,3}"), dict(choice=["yes", "no"]), dict(grammar='start: "a" | "b"'),
    dict(grammar='root ::= "a" [0-9]+'),
    dict(structural_tag=json.dumps({"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}],
                                    "triggers": ["<f"]}))]
BAD: list[tuple[dict[str, Any], str]] = [
    (dict(json="{"), "JSON"), (dict(json="[1]"), "object"),
    (dict(json='{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    (dict(json='{"$ref": "#/nowhere"}'), ""), (dict(json='{"$ref": "https://example.com/schema"}'), ""),
    (dict(json='{"type": "what"}'), ""), (dict(json='{"type": "string", "pattern": "(?=a)b"}'), ""),
    (dict(regex="["), "regex"), (dict(regex="(a)\\1"), ""), (dict(grammar="start: missing"), "missing"),
    (dict(grammar="nothing of the kind"), ""), (dict(grammar='start: "a'), ""),
    (dict(structural_tag="1"), "structural"),
    (dict(structural_tag='{"structures": [{"begin": "a", "schema": {}, "end": ""}], "triggers": ["b"]}'), "trigger")]


def run(task: Callable[[GrammarChecker], Awaitable[None]]) -> None:
    async def whole() -> None:
        checker = GrammarChecker()
        try:
            await task(checker)
        finally:
            await checker.close()
    asyncio.run(whole())


def test_sound_grammars_pass_and_broken_ones_are_refused_with_a_reason():
    async def task(checker: GrammarChecker) -> None:
        for form in GOOD:
            await checker.check(StructuredOutputs(**form))
        helper = checker._helper
        for form, words in BAD:
            with pytest.raises(RequestError, match=words or ".") as found:
                await checker.check(StructuredOutputs(**form))
            assert found.value.param == "structured_outputs" and len(str(found.value)) < 700
        assert checker._helper is helper and helper is not None and helper.process.poll() is None
    run(task)


def test_whatever_a_grammar_does_to_the_helper_the_next_one_is_checked_as_ever():
    async def task(checker: GrammarChecker) -> None:
        for form in (dict(regex="(ab){1000000000}"), dict(regex="(a{1,9999}){9999}"), dict(json='{"$ref": "#"}')):
            with contextlib.suppress(RequestError, OverloadedError):
                await checker.check(StructuredOutputs(**form))
            await checker.check(StructuredOutputs(regex="fine"))
    run(task)


def test_a_grammar_that_ends_the_helpers_child_leaves_the_helper_and_says_what_it_took():
    async def task(checker: GrammarChecker) -> None:
        assert 0 < await checker.check(StructuredOutputs(regex="fine")) < 1
        helper = checker._helper
        with pytest.raises(RequestError, match="64 MB"):
            await checker.check(StructuredOutputs(regex="(ab){1000000000}"))
        await checker.check(StructuredOutputs(regex="(cd)?"))
        assert checker._helper is helper
    run(task)


def test_the_helper_works_on_the_servers_loop_and_ends_with_the_checker():
    pids: list[int] = []

    async def task() -> None:
        checker = GrammarChecker()
        await checker.check(StructuredOutputs(regex="fine"))
        assert checker._helper is not None
        pids.append(checker._helper.process.pid)
        pids.append(int(Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text()))
        await checker.close()
        await checker.close()
    uvloop.run(task())
    until = time.monotonic() + 10
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < until, pids
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_hundred_hostile_grammars_are_refused_and_those_that_only_look_hostile_answered():
    """No two are alike. The harmless ones may be refused on a slow machine; those of no size are not."""
    forms = [*hostile(), *harmless()]
    assert len(hostile()) == 100 and len({json.dumps(form) for _, form in forms}) == len(forms)
    refused: dict[str, str] = {}

    async def task(checker: GrammarChecker) -> None:
        for name, form in forms:
            spec = sized(form)
            try:
                if isinstance(spec, str):
                    raise RequestError(spec)
                await checker.check(spec)
            except (RequestError, OverloadedError) as error:    # the latter on a machine that is very busy
                refused[name] = str(error)
    run(task)
    assert [name for name, _ in hostile() if not refused.get(name)] == []
    assert not {"(a+)+b", "(a|a)*b", 'start: start "a" | start start | "a"'} & refused.keys()


def test_a_helper_that_is_killed_is_replaced():
    async def task(checker: GrammarChecker) -> None:
        await checker.check(StructuredOutputs(regex="a"))
        assert checker._helper is not None
        checker._helper.process.kill()
        checker._helper.process.wait()
        await checker.check(StructuredOutputs(regex="b"))
    run(task)


def test_a_grammar_is_not_blamed_for_a_helper_that_somebody_killed():
    """It was refused as too large, and stayed so."""
    async def task(checker: GrammarChecker) -> None:
        await checker.check(StructuredOutputs(choice=["a"]))
        helper = checker._helper
        assert helper is not None
        os.killpg(helper.process.pid, signal.SIGSTOP)
        asking = asyncio.create_task(checker.check(StructuredOutputs(choice=["b"])))
        await asyncio.sleep(0.05)
        os.killpg(helper.process.pid, signal.SIGKILL)
        await asking
    run(task)


def test_answers_are_remembered_also_refusals():
    async def task(checker: GrammarChecker) -> None:
        for _ in range(2):
            with pytest.raises(RequestError):
                await checker.check(StructuredOutputs(regex="["))
            await checker.close()               # the second answer needs no helper
    run(task)


def test_a_helper_that_takes_too_long_is_killed(monkeypatch):
    async def task(checker: GrammarChecker) -> None:
        await checker.check(StructuredOutputs(regex="a"))
        monkeypatch.setattr("frontend.grammar_check.LATE_S", 0.0)
        with pytest.raises(OverloadedError, match="could not be checked within 0 s"):
            await checker.check(StructuredOutputs(regex="b"))
        assert checker._helper is None
        monkeypatch.undo()
        await checker.check(StructuredOutputs(regex="b"))       # it was not the grammar's fault
    run(task)


@pytest.mark.parametrize("form, words", [
    ({}, "exactly one"), (dict(json="{}", regex="a"), "exactly one"), (dict(regex=""), "empty"),
    (dict(choice=[]), "1 to"), (dict(choice=["a", ""]), "none empty"), (dict(regex="(" * 65), "nests 65"),
    (dict(json="{" * 200), "nests"), (dict(grammar="x" * 200_000), "characters"), (dict(regex="\ud800"), "surrogate"),
    (dict(choice=["a"] * 2000), "2000"), (dict(regex="a\0"), "NUL"), (dict(json_object=False), "exactly one")])
def test_sizes_and_kinds_are_checked_before_anything_runs(form, words):
    with pytest.raises(RequestError, match=words):
        StructuredOutputs(**form)
