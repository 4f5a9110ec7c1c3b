"""One request on its way back: text, stop strings, several choices, slow consumers, errors."""
from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from frontend.outputs import OutputKind, RequestOutput
from frontend.request_stream import Choice, RequestStream
from frontend.tokenizer import Tokenizer, pack_ids
from ipc.errors import FAULT, INVALID, RequestError, RequestFailedError
from ipc.messages import FINISH_ABORT, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP, Admitted, Finished
from ipc.sampling_params import SamplingParams

TOKENIZER = Tokenizer.bytes_only(300)
END = 257                                       # <|im_end|>, a special token


class TextSink:
    """Takes text as `take` says, and has no shorter way."""

    def __init__(self, take: Callable[[int, str], bool]) -> None:
        self.take = take

    def __call__(self, index: int, text: str) -> bool:
        return self.take(index, text)

    def writer(self, index: int) -> None:
        return None


def make_stream(kind: OutputKind = "delta", **params: object) -> RequestStream:
    wanted = SamplingParams(**params)
    stream = RequestStream("request-1", "hi", pack_ids([104, 105]), wanted, kind)
    stream.choices = [Choice(stream, 100 + index, index, TOKENIZER) for index in range(wanted.n)]
    return stream


def feed(choice: Choice, data: bytes | list[int]) -> bool:
    """These tokens arrive, as the engine client enters them. True when a stop string ended the choice."""
    for token in data:
        if choice.finish_reason is None:
            if choice.receive(token, False):
                choice.stream.on_end()
            choice.stream.on_token(choice, 0)
    return choice.is_ended


def finish(choice: Choice, reason: int = FINISH_LENGTH, stop_token: int = -1, **fields: object) -> None:
    choice.stream.on_finished(choice, Finished(choice.request_id, reason, stop_token, **fields))


def take(stream: RequestStream) -> RequestOutput:
    """The next news, which must be there already."""
    return asyncio.run(asyncio.wait_for(stream.next(), 5))


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_pieces_agree_with_the_whole_text(kind: OutputKind) -> None:
    stream = make_stream(kind)
    [choice] = stream.choices
    pieces = []
    for data in (b"He", b"llo", b", you"):
        feed(choice, data)
        pieces.append(take(stream))
    finish(choice)
    pieces.append(take(stream))
    texts, ids = ([getattr(piece.outputs[0], name) for piece in pieces] for name in ("text", "token_ids"))
    if kind == "delta":
        assert texts == ["He", "llo", ", you", ""] and sum(ids, []) == list(b"Hello, you")
    else:
        assert texts == ["He", "Hello", "Hello, you", "Hello, you"] and ids[-1] == list(b"Hello, you")
    assert [piece.finished for piece in pieces] == [False, False, False, True]
    assert [piece.usage_completion_tokens for piece in pieces] == [2, 5, 10, 10]
    assert pieces[-1].outputs[0].finish_reason == "length" and pieces[-1].usage_prompt_tokens == 2


def test_a_slow_consumer_finds_one_joined_delta() -> None:
    stream = make_stream()
    feed(stream.choices[0], b"abc")
    feed(stream.choices[0], b"def")
    assert take(stream).outputs[0].text == "abcdef"


def test_a_sink_takes_text_in_order_and_what_it_refuses_is_yielded() -> None:
    """Whatever it takes and whenever the consumer runs: each character goes one way, and none overtakes another."""
    rng = random.Random(3)
    for _ in range(200):
        stream = make_stream(stop=["zz"])
        told: list[tuple[int, str]] = []
        [choice] = stream.choices

        def take_some(index: int, text: str, told: list[tuple[int, str]] = told) -> bool:
            taken = rng.random() < 0.6
            if taken:
                told.append((index, text))
            return taken

        stream.sink = TextSink(take_some)
        for letter in b"abcdefghijklmnopzzq":
            feed(choice, [letter])
            if choice.new_text and rng.random() < 0.4:
                told += [(output.index, output.text) for output in take(stream).outputs]
        if choice.has_news:
            told += [(output.index, output.text) for output in take(stream).outputs]
        assert "".join(text for _, text in told) == "abcdefghijklmnop" and {index for index, _ in told} == {0}


def test_what_a_sink_takes_wakes_nobody() -> None:
    stream = make_stream()
    stream.sink = TextSink(lambda index, text: True)
    feed(stream.choices[0], b"abc")
    assert not stream.choices[0].has_news
    finish(stream.choices[0])
    last = take(stream)
    assert last.finished and last.outputs[0].text == "" and last.usage_completion_tokens == 3


def test_final_waits_for_the_end_and_then_gives_every_choice() -> None:
    stream = make_stream("final", n=2)
    first, second = stream.choices

    async def run() -> RequestOutput:
        waiting = asyncio.create_task(stream.next())
        feed(first, b"one")
        finish(first)
        feed(second, b"two")
        await asyncio.sleep(0)
        assert not waiting.done()
        finish(second)
        return await waiting

    output = asyncio.run(run())
    assert output.finished
    assert [(choice.index, choice.text, choice.finish_reason) for choice in output.outputs] == [
        (0, "one", "length"), (1, "two", "length")]
    assert output.usage_completion_tokens == 6


def test_deltas_bring_only_choices_with_news_and_finished_comes_once() -> None:
    stream = make_stream(n=2)
    first, second = stream.choices
    feed(second, b"x")
    assert [(choice.index, choice.text) for choice in take(stream).outputs] == [(1, "x")]
    finish(first)
    output = take(stream)
    assert [choice.index for choice in output.outputs] == [0] and not output.finished
    finish(second)
    output = take(stream)
    assert [choice.index for choice in output.outputs] == [1] and output.finished


def test_a_stop_string_is_never_partly_streamed() -> None:
    """Pieces as in a report about another engine: the whole text was the stop string, yet its first token came out."""
    stream = make_stream(stop=["DEFGHIJ"])
    [choice] = stream.choices
    for data in (b"DEF", b"G", b"HI"):
        assert not feed(choice, data)
        assert take(stream).outputs[0].text == ""
    assert feed(choice, b"JK")
    output = take(stream)
    assert output.finished and output.outputs[0].text == ""
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "DEFGHIJ")
    assert output.usage_completion_tokens == 7          # the K after it does not count
    finish(choice, FINISH_ABORT)                        # the engine's answer to the abort changes nothing
    assert (choice.finish_reason, choice.token_ids) == ("stop", list(b"DEFGHIJ"))


def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    stream = make_stream(stop=["lo there"])
    [choice] = stream.choices
    feed(choice, b"Hello th")
    assert take(stream).outputs[0].text == "Hel"
    finish(choice)
    assert take(stream).outputs[0].text == "lo th"


def test_a_stop_string_does_not_count_before_min_tokens() -> None:
    stream = make_stream("cumulative", stop=["b"], min_tokens=4, max_tokens=9)
    [choice] = stream.choices
    assert feed(choice, b"abcdeb!")
    output = take(stream)
    assert (output.outputs[0].text, output.usage_completion_tokens) == ("abcde", 6)


def test_include_stop_str_in_output_keeps_it() -> None:
    stream = make_stream(stop=["cd"], include_stop_str_in_output=True)
    feed(stream.choices[0], b"abcde")
    assert take(stream).outputs[0].text == "abcd"


def test_a_stop_token_counts_but_is_no_text() -> None:
    stream = make_stream(skip_special_tokens=False)
    [choice] = stream.choices
    feed(choice, b"ok")
    choice.receive(END, True)
    finish(choice, FINISH_STOP, END)
    output = take(stream)
    assert output.outputs[0].text == "ok" and output.outputs[0].token_ids == [*b"ok", END]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", END)
    assert output.usage_completion_tokens == 3


def test_a_character_comes_out_whole_and_an_unfinished_one_shows_once() -> None:
    stream = make_stream()
    [choice] = stream.choices
    texts = []
    for token in "A 🙂".encode() + "世".encode()[:2]:
        feed(choice, [token])
        texts.append(take(stream).outputs[0].text)
    assert texts == ["A", " ", "", "", "", "🙂", "", ""]
    finish(choice)
    assert take(stream).outputs[0].text == "�"


def test_an_error_reaches_the_waiting_caller_with_its_class() -> None:
    async def run(code: int) -> None:
        stream = make_stream()
        waiting = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        finish(stream.choices[0], FINISH_ERROR, error_code=code, message="prompt has 9 tokens, max_model_len is 8")
        await waiting

    with pytest.raises(RequestError, match="max_model_len is 8"):
        asyncio.run(run(INVALID))
    with pytest.raises(RequestFailedError, match="max_model_len is 8"):
        asyncio.run(run(FAULT))


def test_the_first_admission_gives_cached_tokens_and_the_clamped_limit() -> None:
    stream = make_stream()
    [choice] = stream.choices
    stream.on_admitted(Admitted(choice.request_id, 16, 5, 2_000_000_000))
    stream.on_admitted(Admitted(choice.request_id, 99, 99, 9_000_000_000))     # its return after a preemption
    feed(choice, b"a")
    finish(choice, num_preemptions=1)
    output = take(stream)
    assert (output.num_cached_tokens, output.max_tokens, output.num_preemptions) == (16, 5, 1)
    assert output.metrics is not None and output.metrics.first_scheduled_time == 2.0
    assert output.metrics.finish_time is not None and output.metrics.first_token_time is not None
