"""vLLM's JSON becomes rows that predict the completion; what is no number is refused."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd_client.services.vllm_logprobs import topk_of_prompt_logprobs
from mopd_protocol.errors import DataError
from mopd_protocol.topk_logprobs import TopKLogprobs

#: As vLLM 0.32 answered for the prompt 5, 100, 101, 102, 0 with prompt_logprobs 3.
RECORDED = json.loads(
    """[null,
    {"100":{"logprob":-5.92170524597168,"rank":81,"decoded_token":""},
     "279":{"logprob":-5.514502048492432,"rank":1,"decoded_token":"he"},
     "19":{"logprob":-5.614680290222168,"rank":2,"decoded_token":"/"},
     "404":{"logprob":-5.624129295349121,"rank":3,"decoded_token":" ju"}},
    {"101":{"logprob":-6.1516547203063965,"rank":309,"decoded_token":""},
     "1":{"logprob":-5.513566017150879,"rank":1,"decoded_token":"<|pad|>"},
     "244":{"logprob":-5.590979099273682,"rank":2,"decoded_token":""},
     "404":{"logprob":-5.604824542999268,"rank":3,"decoded_token":" ju"}},
    {"102":{"logprob":-6.225169658660889,"rank":361,"decoded_token":""},
     "44":{"logprob":-5.549452781677246,"rank":1,"decoded_token":"H"},
     "123":{"logprob":-5.623889446258545,"rank":2,"decoded_token":""},
     "2":{"logprob":-5.651849746704102,"rank":3,"decoded_token":"<|system|>"}},
    {"0":{"logprob":-6.274829864501953,"rank":376,"decoded_token":"<|end|>"},
     "244":{"logprob":-5.604554653167725,"rank":1,"decoded_token":""},
     "2":{"logprob":-5.645817279815674,"rank":2,"decoded_token":"<|system|>"},
     "256":{"logprob":-5.681325912475586,"rank":3,"decoded_token":""}}]"""
)
KNOWN = np.ones(420, dtype=np.bool_)


def read(entries: list[Any], token_ids: list[int], **changes: Any) -> TopKLogprobs:
    settings = {"first": 1, "k": 3, "known": KNOWN, **changes}
    return topk_of_prompt_logprobs(entries, token_ids, **settings)


def told(**logprobs: Any) -> dict[str, Any]:
    """An entry: ``_7`` is token 7."""
    return {name[1:]: {"logprob": value} for name, value in logprobs.items()}


def test_a_recorded_answer_is_read():
    found = read(RECORDED, [5, 100, 101, 102, 0], first=3)

    assert found.ids.tolist() == [[44, 123, 2], [244, 2, 256]]
    np.testing.assert_array_equal(found.token_logprobs, np.float32([-6.22516966, -6.27482986]))
    np.testing.assert_array_equal(
        found.logprobs[0], np.float32([-5.54945278, -5.62388945, -5.65184975])
    )
    kept = sum(math.exp(x) for x in (-5.549452781677246, -5.623889446258545, -5.651849746704102))
    assert found.tail_logprobs[0] == pytest.approx(math.log(1 - kept), abs=1e-7)


def test_a_token_that_is_among_the_most_likely_is_one_of_them():
    entries = [None, told(_7=-1.5, _8=-0.5, _9=-2.5)]

    found = read(entries, [1, 7])

    assert found.ids.tolist() == [[8, 7, 9]]
    assert found.token_logprobs.tolist() == [-1.5]


def test_a_token_that_is_not_among_the_most_likely_is_left_out_of_them():
    entries = [None, told(_7=-3.5, _8=-0.5, _9=-2.5, _10=-3.5)]  # as likely as the third

    found = read(entries, [1, 7])

    assert found.ids.tolist() == [[8, 9, 10]]
    assert found.token_logprobs.tolist() == [-3.5]


@pytest.mark.parametrize("nothing", [-9999.0, -math.inf, None])
def test_an_impossible_token_is_absent(nothing):
    found = read([None, told(_7=nothing, _8=-0.5, _9=nothing)], [1, 7])

    assert found.ids.tolist() == [[8, -1, -1]]
    assert found.token_logprobs.tolist() == [-math.inf]


def test_ids_that_are_no_tokens_are_left_to_the_tail():
    known = np.ones(10, dtype=np.bool_)
    known[8] = False  # a hole; 10 and more are the padding of the head
    found = read([None, told(_7=-1.5, _8=-0.9, _11=-1.8)], [1, 7], known=known)

    assert found.ids.tolist() == [[7, -1, -1]]
    assert found.tail_logprobs[0] == pytest.approx(math.log(1 - math.exp(-1.5)))


def test_a_tail_too_small_for_float32_is_not_impossible():
    found = read([None, told(_7=0.0, _8=-30.0, _9=-31.0)], [1, 7])

    assert -17 < found.tail_logprobs[0] < -16


def test_where_all_ids_are_told_nothing_is_left():
    known = np.array([False] * 7 + [True] * 3)
    found = read([None, told(_7=-1.0, _8=-1.0, _9=math.log(1 - 2 / math.e))], [1, 7], known=known)

    assert found.tail_logprobs.tolist() == [-math.inf]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([None], "1 prompt_logprobs for 2 prompt tokens"),
        ([None, None], "prompt_logprobs 1 are None, expected an object"),
        ([None, told(_8=-0.5)], "prompt_logprobs 1 do not hold the prompt's own token"),
        ([None, {"7": {}}], "prompt_logprobs 1 hold no logprobs"),
        ([None, {"seven": {"logprob": -1.0}}], "prompt_logprobs 1 hold no logprobs"),
        ([None, told(_7=math.nan)], "prompt_logprobs 1 hold no logprobs"),
        ([None, told(_7=2.0)], "a value above 0"),
        ([None, told(_7=-1, _8=-2, _9=-3, _10=-4, _11=-5)], "5 prompt_logprobs for a token"),
        ([None, told(_7=-0.1, _8=-0.1, _9=-0.1)], "holds a probability mass of 2.7"),
    ],
)
def test_what_cannot_be_read_is_refused(entries, message):
    with pytest.raises(DataError, match=message):
        read(entries, [1, 7])


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5))
def test_the_rows_are_the_distributions_best_entries(k, tokens, first_extra):
    """Against the distributions themselves."""
    generator = np.random.default_rng([k, tokens, first_extra])
    width, first = 30, 1 + first_extra
    token_ids = generator.integers(0, width, size=first + tokens).tolist()
    rows = [np.log(generator.dirichlet(np.full(width, 0.3)) + 1e-30) for _ in token_ids]
    entries: list[Any] = [None]
    for token_id, row in zip(token_ids[1:], rows[1:], strict=True):
        best = np.argsort(-row)[:k].tolist()
        entries.append({str(t): {"logprob": float(row[t])} for t in {token_id, *best}})

    found = read(entries, token_ids, first=first, k=k, known=np.ones(width, dtype=np.bool_))

    for at, row in enumerate(rows[first:]):
        best = np.sort(row)[::-1][:k]
        np.testing.assert_allclose(found.logprobs[at, : len(best)], best, rtol=1e-6)
        assert (found.ids[at, len(best) :] == -1).all()
        assert found.token_logprobs[at] == np.float32(row[token_ids[first + at]])
        outside = math.fsum(np.exp(np.sort(row)[::-1][k:]))
        assert math.exp(found.tail_logprobs[at]) == pytest.approx(outside, abs=1e-6)
