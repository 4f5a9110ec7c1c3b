"""What one request may ask for: every refusal names field, value and range, whatever is thrown at it."""
from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.errors import RequestError
from ipc.sampling_params import MAX_N, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS, SamplingParams

FIELDS = SamplingParams.__struct_fields__


def test_logit_bias_may_have_ids_as_text_as_in_json() -> None:
    assert SamplingParams(logit_bias={"5": 1.0, 7: 2.0}).logit_bias == {5: 1.0, 7: 2.0}   # type: ignore[dict-item]
    with pytest.raises(RequestError, match="logit_bias must be an integer, not 'a'"):
        SamplingParams(logit_bias={"a": 1.0})       # type: ignore[dict-item]


def test_the_defaults_are_those_of_the_field():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.stop, params.stop_token_ids) == (16, 0,
                                                                                                       None, [], [])
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (False, True, False)


@pytest.mark.parametrize("values, text", [
    (dict(n=0), f"n is 0; allowed are 1 to {MAX_N}"),
    (dict(n=MAX_N + 1), f"n is {MAX_N + 1}; allowed are 1 to {MAX_N}"),
    (dict(n=1.0), "n must be an integer, not 1.0"),
    (dict(n=True), "n must be an integer, not True"),
    (dict(temperature=-0.1), "temperature is -0.1; allowed are 0 to 100"),
    (dict(temperature=101), "temperature is 101; allowed are 0 to 100"),
    (dict(temperature=math.nan), "temperature is nan; allowed are 0 to 100"),
    (dict(temperature=math.inf), "temperature is inf; allowed are 0 to 100"),
    (dict(temperature="hot"), "temperature must be a number, not 'hot'"),
    (dict(temperature=None), "temperature must be a number, not None"),
    (dict(temperature=10 ** 400), "temperature is an integer of 1329 bits; allowed are 0 to 100"),
    (dict(top_k=-2), "top_k is -2; allowed are 0 to 2147483648"),
    (dict(top_p=0.0), "top_p is 0.0 but must be above 0 unless temperature is 0"),
    (dict(top_p=1.01), "top_p is 1.01; allowed are 0 to 1"),
    (dict(min_p=-0.01), "min_p is -0.01; allowed are 0 to 1"),
    (dict(seed=1 << 64), "seed is 18446744073709551616; allowed are -9223372036854775808 to 18446744073709551615"),
    (dict(seed=10 ** 5000), "seed is an integer of 16610 bits"),
    (dict(max_tokens=0), "max_tokens is 0; allowed are 1 to 2147483648"),
    (dict(min_tokens=-1), "min_tokens is -1; allowed are 0 to 2147483648"),
    (dict(min_tokens=5, max_tokens=4), "min_tokens is 5, above max_tokens 4; lower it or raise max_tokens"),
    (dict(stop=[""]), f"stop contains ''; a stop string has 1 to {MAX_STOP_STRING_CHARS} characters"),
    (dict(stop=["x" * (MAX_STOP_STRING_CHARS + 1)]), f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters"),
    (dict(stop=["a"] * (MAX_STOP_STRINGS + 1)), f"stop has {MAX_STOP_STRINGS + 1} strings; at most {MAX_STOP_STRINGS}"),
    (dict(stop=[1]), "stop must be a string or a list of strings, not [1]"),
    (dict(stop_token_ids=[-1]), "stop_token_ids is -1; allowed are 0 to 2147483647"),
    (dict(stop_token_ids=[1.5]), "stop_token_ids must be an integer, not 1.5"),
    (dict(stop_token_ids=(1,)), "stop_token_ids must be a list of token ids, not (1,)"),
    (dict(stop_token_ids=[1] * (MAX_STOP_TOKEN_IDS + 1)), f"stop_token_ids has {MAX_STOP_TOKEN_IDS + 1} ids"),
    (dict(ignore_eos=1), "ignore_eos must be true or false, not 1"),
])
def test_a_bad_value_is_refused_with_field_value_and_range(values, text):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert text in str(caught.value) and caught.value.param in values


@pytest.mark.parametrize("values, expected", [
    (dict(stop="end"), ("stop", ["end"])), (dict(stop=None), ("stop", [])),
    (dict(stop_token_ids=None), ("stop_token_ids", [])),
    (dict(top_k=-1), ("top_k", 0)), (dict(seed=-1), ("seed", (1 << 64) - 1)), (dict(max_tokens=None), ("max_tokens",
                                                                                                       None)),
    (dict(top_p=0.0, temperature=0), ("top_p", 0.0)), (dict(seed=0), ("seed", 0)),
])
def test_forms_that_mean_the_same_are_brought_to_one(values, expected):
    params = SamplingParams(**values)
    assert getattr(params, expected[0]) == expected[1]


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_whatever_a_field_holds_it_is_taken_or_refused(name):
    """Above all integers that Python does not write out."""
    huge = 10 ** 5000
    for value in (huge, -huge, [huge], {huge: 1}, {1: huge}, [[huge]], {"9" * 5000: 1}, {"a": huge}, object(), b"x"):
        try:
            SamplingParams(**{name: value})
        except RequestError:
            pass


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(RequestError) as caught:
        SamplingParams(temperature="x" * 10_000)
    assert len(str(caught.value)) < 150


def test_an_unknown_field_is_refused_and_not_ignored():
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=3)
    with pytest.raises(msgspec.ValidationError, match="best_of"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({"best_of": 3}), type=SamplingParams)


def test_a_copy_is_checked_again():
    params = SamplingParams(temperature=0.5)
    assert params.replace(n=3).n == 3 and params.n == 1
    with pytest.raises(RequestError, match="n is 0"):
        params.replace(n=0)
    with pytest.raises(AttributeError):
        params.n = 2


def test_stop_ids_are_checked_against_the_width_of_the_logits():
    SamplingParams(stop_token_ids=[99]).check_for_model(100)
    with pytest.raises(RequestError, match="stop_token_ids contains 100; the model's ids are 0 to 99") as caught:
        SamplingParams(stop_token_ids=[3, 100]).check_for_model(100)
    assert caught.value.param == "stop_token_ids"


def test_defaults_cost_nothing_on_the_wire():
    assert len(msgspec.msgpack.encode(SamplingParams())) <= 3
    params = SamplingParams(seed=(1 << 64) - 1, stop=["a"], top_k=5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


JSON = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
                 st.lists(st.integers(), max_size=2),
                 st.lists(st.text(max_size=3), max_size=2),
                 st.dictionaries(st.text(max_size=2), st.integers(), max_size=1))


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4))
def test_whatever_the_values_the_answer_is_parameters_or_a_refusal(values):
    try:
        params = SamplingParams(**values)
    except RequestError as error:
        assert error.param in FIELDS and len(str(error)) < 250
    else:
        assert 0 <= params.temperature <= 100 and 0 <= params.top_p <= 1 and 1 <= params.n <= MAX_N
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
