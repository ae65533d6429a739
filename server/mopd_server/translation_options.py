"""Options of the command line for scores in the ids of a student with another tokenizer."""

import argparse
from pathlib import Path
from typing import get_args

from mopd_server.options import MAX_SECONDS, Append, OptionGroup, pair, positive
from mopd_server.settings import GatewaySettings, ServiceKind, TranslationSettings

TRANSLATE_EXAMPLE = """\
example: the scores of a Llama teacher in the ids of a Qwen student, for TRL's trainers

  mopd-teacher translate --teacher http://127.0.0.1:8101 --student Qwen/Qwen3-1.7B \\
      --prompts prompts.jsonl --port 8201

  curl http://127.0.0.1:8201/v1/completions -H 'Content-Type: application/json' -d '{
    "prompt": [STUDENT IDS OF PROMPT AND COMPLETION], "max_tokens": 1, "prompt_logprobs": 16}'

The messages behind a prompt come with the request ("messages"), or are those of --prompts with
these ids, or follow from the ids by the student's chat template; else the request gets 400.

For pairs of tokenizers that share most words, and losses with a tail for all other tokens. mopd's
own trainer (mopd train) needs no translation and is exact. "mopd_coverage" in every response,
/v1/manifest and /metrics show how much is translated.
"""


def add_gateway_options(translate: argparse.ArgumentParser) -> None:
    """Add the options of ``GatewaySettings``."""
    teacher = OptionGroup(translate, "teacher", GatewaySettings)
    teacher.group.add_argument(
        "--teacher", required=True, metavar="URL", help="address of the teacher's service"
    )
    teacher.add(
        "--teacher-kind",
        "mopd: started by mopd-teacher serve; vllm: a stock vLLM server",
        choices=get_args(ServiceKind),
    )
    teacher.add(
        "--tokenizer",
        "tokenizer of a vLLM server's model: a folder or hub id",
        metavar="TOKENIZER",
    )
    teacher.add("--name", "name of this service (default: that of the teacher)")
    teacher.add("--teacher-key-file", "API key of the teacher", type=Path, metavar="FILE")
    for flag, dest, meaning in (
        ("--teacher-timeout", "teacher_timeout_seconds", "for one response of the teacher"),
        ("--teacher-wait", "teacher_wait_seconds", "for the teacher to become ready at the start"),
    ):
        seconds = positive(float, at_most=MAX_SECONDS)
        teacher.add(flag, meaning, dest=dest, type=seconds, metavar="SECONDS")
    for flag, metavar, meaning in (
        ("--max-concurrency", "REQUESTS", "concurrent requests to the teacher"),
        ("--max-queue-tokens", "TOKENS", "tokens in the queue; requests beyond get 429"),
    ):
        teacher.add(flag, meaning, type=positive(int), metavar=metavar)


def add_translation_options(command: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the options of ``TranslationSettings``."""
    translation = OptionGroup(
        command, "translation to a student with another tokenizer", TranslationSettings
    )
    translation.add(
        "--student",
        "tokenizer and chat template of the student: a folder or hub id. /v1/completions and "
        "/generate receive and return its ids. For pairs that share most words, and losses with a "
        "tail; mopd's own trainer needs no translation and is exact",
        required=required,
        metavar="TOKENIZER",
    )
    translation.add("--student-revision", "hub commit, branch or tag", metavar="REVISION")
    translation.add(
        "--prompts",
        "JSON lines with 'messages' (or 'prompt'): prompts that requests contain as ids",
        type=Path,
        metavar="FILE",
    )
    for flag, whose in (
        ("--student-template-arg", "student"),
        ("--teacher-template-arg", "teacher"),
    ):
        translation.add(
            flag,
            f"variable of the {whose}'s chat template, such as enable_thinking=false; repeatable",
            action=Append,
            type=pair("KEY=VALUE"),
            metavar="KEY=VALUE",
        )
    for flag, metavar, meaning in (
        ("--teacher-top-k", "K", "the teacher's tokens per row from which the student's follow"),
        ("--extra-rounds", "N", "rounds of extra rows for texts of several tokens"),
        ("--extra-rows", "N", "maximum extra rows of one completion"),
    ):
        translation.add(flag, meaning, type=positive(int), metavar=metavar)
