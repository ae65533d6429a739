"""Responses of every shape that a teacher may send, and what being equal means for them."""

import numpy as np
from hypothesis import strategies as st

from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_sequence import END_OF_TURN, TokenSequence
from mopd_protocol.topk_logprobs import TopKLogprobs

LOWEST = float(np.finfo(np.float32).min)

names = st.sampled_from([END_OF_TURN, "bos", "<think>", "ünïcödé\n"])


def two_scores() -> LogprobsResponse:
    """``é`` in two halves and an end of turn; then an empty completion; then one of another k."""
    halves = TokenSequence([7, 8, 0], [1, 2, 2], "é".encode(), {2: END_OF_TURN})
    narrow = TopKLogprobs(
        [[7, 3], [8, -1], [0, 5]],
        [[-0.25, -2.5], [-0.125, -np.inf], [-0.5, -1.0]],
        [-0.25, -0.125, -0.5],
        [-2.0, -3.0, -np.inf],
    )
    nothing = TopKLogprobs(np.zeros((0, 2)), np.zeros((0, 2)), [], [])
    invalid = TokenSequence([9], [2], b"\xff\xfe")
    wide = TopKLogprobs([[1, 2, 9]], [[-1.0, -1.5, -2.0]], [-2.0], [-4.0])
    return LogprobsResponse(
        manifest_id="m",
        ids=("a", None, "c"),
        scores=(
            TeacherScore("m", halves, narrow),
            TeacherScore("m", TokenSequence([], [], b""), nothing),
            TeacherScore("m", invalid, wide),
        ),
        timings={"engine": 0.5},
    )


@st.composite
def sequences(draw: st.DrawFn) -> TokenSequence:
    """Tokens of any bytes, valid UTF-8 or not; some without bytes are marked."""
    pieces = draw(st.lists(st.binary(max_size=4), max_size=6))
    empty = [position for position, piece in enumerate(pieces) if not piece]
    return TokenSequence(
        token_ids=draw(_vector(st.integers(0, 2**31 - 1), len(pieces))),
        byte_ends=np.cumsum([len(piece) for piece in pieces]),
        text=b"".join(pieces),
        marks={position: draw(names) for position in empty if draw(st.booleans())},
    )


@st.composite
def topks(draw: st.DrawFn, rows: int) -> TopKLogprobs:
    """Distributions with anything from no entry to many; some rows have fewer than others."""
    k = draw(st.integers(0, 5))
    ids = np.full((rows, k), -1)
    logprobs = np.full((rows, k), -np.inf)
    for row in range(rows):
        chosen = draw(st.lists(st.integers(0, 2**31 - 1), max_size=k, unique=True))
        # Each below 1/k, so that the mass stays below one for any draw; float32's limits included.
        highest = float(np.float32(-np.log(max(k, 1)) - 1e-3))
        likely = st.floats(LOWEST, highest, width=32) | st.floats(-40, highest, width=32)
        values = sorted((draw(likely) for _ in chosen), reverse=True)
        ids[row, : len(chosen)] = chosen
        logprobs[row, : len(chosen)] = values
    nats = st.floats(LOWEST, 0.0, width=32) | st.just(-np.inf)
    return TopKLogprobs(ids, logprobs, draw(_vector(nats, rows)), draw(_vector(nats, rows)))


@st.composite
def responses(draw: st.DrawFn) -> LogprobsResponse:
    """None, one or several ragged sequences."""
    completions = draw(st.lists(sequences(), max_size=4))
    scores = tuple(
        TeacherScore("manifest", completion, draw(topks(len(completion))))
        for completion in completions
    )
    return LogprobsResponse(
        manifest_id="manifest",
        ids=tuple(draw(st.none() | st.text(max_size=3)) for _ in scores),
        scores=scores,
        timings=draw(st.dictionaries(st.sampled_from(["queue", "engine"]), st.floats(0, 1e9))),
    )


def assert_same(actual: LogprobsResponse, expected: LogprobsResponse) -> None:
    """Assert bitwise equality, except for missing entries, which pad rows to one width."""
    assert actual.manifest_id == expected.manifest_id
    assert actual.ids == expected.ids
    assert dict(actual.timings) == dict(expected.timings)
    for score, reference in zip(actual.scores, expected.scores, strict=True):
        assert score.manifest_id == reference.manifest_id
        assert score.completion.text == reference.completion.text
        assert score.completion.marks == reference.completion.marks
        for name in ("token_ids", "byte_ends"):
            _assert_bits(getattr(score.completion, name), getattr(reference.completion, name))
        for name in ("token_logprobs", "tail_logprobs"):
            _assert_bits(getattr(score.topk, name), getattr(reference.topk, name))
        k = min(score.topk.k, reference.topk.k)
        for name, missing in (("ids", -1), ("logprobs", -np.inf)):
            values, references = getattr(score.topk, name), getattr(reference.topk, name)
            _assert_bits(values[:, :k], references[:, :k])
            assert (values[:, k:] == missing).all()
            assert (references[:, k:] == missing).all()


def _assert_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes()


def _vector(elements: st.SearchStrategy[float], length: int) -> st.SearchStrategy[list[float]]:
    return st.lists(elements, min_size=length, max_size=length)
