"""Processor time of a response per row: decoding, and checking it against its request.

python -m bench.response_checks
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from mopd_client.response_checks import check_response
from mopd_protocol import LogprobsRequest, Manifest, SequenceRequest, TokenSequence, TopKLogprobs
from mopd_protocol.codec import decode_binary, encode_binary
from mopd_protocol.manifest import Features
from mopd_protocol.responses import LogprobsResponse
from mopd_protocol.samples import TeacherScore
from mopd_protocol.tokenizers.token_table import TokenRoles

VOCABULARY = 150_000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--k", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=500, help="(default: %(default)s)")
    options = parser.parse_args()
    request, response, manifest = _material(options.sequences, options.tokens, options.k)
    body = encode_binary(response)
    rows = options.sequences * options.tokens
    decode = _microseconds(lambda: decode_binary(body), rows)
    check = _microseconds(lambda: check_response("math", response, request, manifest), rows)
    print(  # noqa: T201
        f"k {options.k}, {options.sequences} sequences of {options.tokens} rows: decoding "
        f"{decode:.2f} us per row, checking {check:.2f} us per row"
    )


def _material(
    sequences: int, tokens: int, k: int
) -> tuple[LogprobsRequest, LogprobsResponse, Manifest]:
    """Return sharp distributions whose completion token is the second entry."""
    draw = np.random.default_rng(0)
    scores: list[TeacherScore] = []
    for _ in range(sequences):
        logits = np.sort(draw.normal(0, 4, (tokens, 4 * k)), axis=1)[:, ::-1]
        logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        tails = np.log(np.exp(logprobs[:, k:]).sum(axis=1))
        ids = draw.integers(0, VOCABULARY - k, (tokens, 1)) + draw.permutation(k)
        completion = TokenSequence(ids[:, 1], np.zeros(tokens, dtype=np.int32), b"")
        topk = TopKLogprobs(ids, logprobs[:, :k], logprobs[:, 1], tails)
        scores.append(TeacherScore("m", completion, topk))
    requests = [
        SequenceRequest(id=str(n), prompt="?", completion_token_ids=score.token_ids.tolist())
        for n, score in enumerate(scores)
    ]
    request = LogprobsRequest(sequences=requests, top_k=k)
    response = LogprobsResponse("m", tuple(each.id for each in requests), tuple(scores))
    manifest = Manifest(
        service="math",
        model="m",
        revision="r",
        engine="e",
        engine_version="1",
        dtype="float32",
        logit_width=VOCABULARY,
        tokenizer_fingerprint="f",
        tokenizer_size=VOCABULARY,
        roles=TokenRoles(),
        chat_template_hash=None,
        max_model_len=8192,
        max_top_k=1024,
        features=Features(
            candidate_ids=True, temperature=True, messages=True, exact_tails=True, exact_text=True
        ),
    )
    return request, response, manifest


def _microseconds(call: Callable[[], object], rows: int, *, rounds: int = 20) -> float:
    """Return the processor time per row, the fastest of several rounds."""
    best = float("inf")
    for _ in range(rounds):
        started = time.process_time()
        call()
        best = min(best, time.process_time() - started)
    return best / rows * 1e6


if __name__ == "__main__":
    main()
