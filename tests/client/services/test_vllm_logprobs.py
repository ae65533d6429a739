"""Conversion of vLLM's prompt_logprobs; invalid numbers raise."""

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

#: Response of vLLM 0.32 to the prompt 5, 100, 101, 102, 0 with prompt_logprobs 3.
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


def convert(entries: list[Any], token_ids: list[int], **changes: Any) -> TopKLogprobs:
    settings = {"first": 1, "k": 3, "known": KNOWN, **changes}
    return topk_of_prompt_logprobs(entries, token_ids, **settings)


def entry(**logprobs: Any) -> dict[str, Any]:
    """Entry of one position: ``_7`` is token 7."""
    return {name[1:]: {"logprob": value} for name, value in logprobs.items()}


def test_a_translating_service_may_name_nothing_or_not_the_token():
    entries = [None, entry(_7=-1.0, _8=-2.0), None]

    topk = convert(entries, [5, 9, 7], known=None)

    assert topk.ids.tolist() == [[7, 8, -1], [-1, -1, -1]]
    assert np.isneginf(topk.token_logprobs).all()
    np.testing.assert_allclose(np.exp(topk.tail_logprobs[1]), 1.0)
    for invalid in ([None, entry(_7=-1.0), entry(_7=-1.0)], [None, None, entry(_7=-1.0)]):
        with pytest.raises(DataError):
            convert(invalid, [5, 9, 7])


def test_a_recorded_response():
    topk = convert(RECORDED, [5, 100, 101, 102, 0], first=3)

    assert topk.ids.tolist() == [[44, 123, 2], [244, 2, 256]]
    np.testing.assert_array_equal(topk.token_logprobs, np.float32([-6.22516966, -6.27482986]))
    np.testing.assert_array_equal(
        topk.logprobs[0], np.float32([-5.54945278, -5.62388945, -5.65184975])
    )
    kept = sum(math.exp(x) for x in (-5.549452781677246, -5.623889446258545, -5.651849746704102))
    assert topk.tail_logprobs[0] == pytest.approx(math.log(1 - kept), abs=1e-7)


def test_the_prompts_token_may_be_among_the_most_likely():
    entries = [None, entry(_7=-1.5, _8=-0.5, _9=-2.5)]

    topk = convert(entries, [1, 7])

    assert topk.ids.tolist() == [[8, 7, 9]]
    assert topk.token_logprobs.tolist() == [-1.5]


def test_the_prompts_token_is_skipped_if_it_is_not_among_the_most_likely():
    entries = [None, entry(_7=-3.5, _8=-0.5, _9=-2.5, _10=-3.5)]  # as likely as the third

    topk = convert(entries, [1, 7])

    assert topk.ids.tolist() == [[8, 9, 10]]
    assert topk.token_logprobs.tolist() == [-3.5]


@pytest.mark.parametrize("nothing", [-9999.0, -math.inf, None])
def test_an_impossible_token_is_missing(nothing):
    topk = convert([None, entry(_7=nothing, _8=-0.5, _9=nothing)], [1, 7])

    assert topk.ids.tolist() == [[8, -1, -1]]
    assert topk.token_logprobs.tolist() == [-math.inf]


def test_ids_without_a_token_are_part_of_the_tail():
    known = np.ones(10, dtype=np.bool_)
    known[8] = False  # a hole; ids from 10 are padding of the head
    topk = convert([None, entry(_7=-1.5, _8=-0.9, _11=-1.8)], [1, 7], known=known)

    assert topk.ids.tolist() == [[7, -1, -1]]
    assert topk.tail_logprobs[0] == pytest.approx(math.log(1 - math.exp(-1.5)))


def test_a_tail_is_at_least_the_resolution_of_float32():
    topk = convert([None, entry(_7=0.0, _8=-30.0, _9=-31.0)], [1, 7])

    assert -17 < topk.tail_logprobs[0] < -16


def test_the_tail_is_empty_if_all_ids_are_entries():
    known = np.array([False] * 7 + [True] * 3)
    topk = convert(
        [None, entry(_7=-1.0, _8=-1.0, _9=math.log(1 - 2 / math.e))], [1, 7], known=known
    )

    assert topk.tail_logprobs.tolist() == [-math.inf]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([None], "found 1, expected 2"),
        ([None, None], "found None, expected an object"),
        ([None, entry(_8=-0.5)], "token is missing"),
        ([None, {"7": {}}], "no valid logprobs"),
        ([None, {"seven": {"logprob": -1.0}}], "no valid logprobs"),
        ([None, entry(_7=math.nan)], "no valid logprobs"),
        ([None, entry(_7=2.0)], "a value above 0"),
        ([None, entry(_7=-1, _8=-2, _9=-3, _10=-4, _11=-5)], "found 5, expected 3 or 4"),
        ([None, entry(_7=-0.1, _8=-0.1, _9=-0.1)], r"probability mass above 1 \(found 2.7"),
    ],
)
def test_invalid_entries_raise(entries, message):
    with pytest.raises(DataError, match=message):
        convert(entries, [1, 7])


@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 5))
def test_rows_are_the_best_entries_of_the_distributions(k, tokens, first_extra):
    """Compare with the distributions."""
    generator = np.random.default_rng([k, tokens, first_extra])
    width, first = 30, 1 + first_extra
    token_ids = generator.integers(0, width, size=first + tokens).tolist()
    rows = [np.log(generator.dirichlet(np.full(width, 0.3)) + 1e-30) for _ in token_ids]
    entries: list[Any] = [None]
    for token_id, row in zip(token_ids[1:], rows[1:], strict=True):
        best = np.argsort(-row)[:k].tolist()
        entries.append({str(t): {"logprob": float(row[t])} for t in {token_id, *best}})

    topk = convert(entries, token_ids, first=first, k=k, known=np.ones(width, dtype=np.bool_))

    for at, row in enumerate(rows[first:]):
        best = np.sort(row)[::-1][:k]
        np.testing.assert_allclose(topk.logprobs[at, : len(best)], best, rtol=1e-6)
        assert (topk.ids[at, len(best) :] == -1).all()
        assert topk.token_logprobs[at] == np.float32(row[token_ids[first + at]])
        outside = math.fsum(np.exp(np.sort(row)[::-1][k:]))
        assert math.exp(topk.tail_logprobs[at]) == pytest.approx(outside, abs=1e-6)
