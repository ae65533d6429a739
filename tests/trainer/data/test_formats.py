"""Formats of data: each gives the same prompt from JSONL, JSON, parquet and a dataset."""

import json
from pathlib import Path
from typing import Any

import pytest

from mopd_protocol.errors import DataError
from mopd_protocol.samples import Prompt
from mopd_trainer.config.run import DataConfig
from mopd_trainer.data.formats import FORMATS
from mopd_trainer.data.prompts import read_prompts
from tests.trainer.data.test_prompts import error_line, read, turns
from tests.trainer.runs import write_lines

SYSTEM, USER, REFERENCE = "be brief", "3 + 4 =", "7"
CHAT = turns("system", SYSTEM, "user", USER)
SHARED = [{"from": "system", "value": SYSTEM}, {"from": "human", "value": USER}]


def part(text: str, kind: str = "text") -> list[dict[str, Any]]:
    return [{"type": kind, "text": text[:3]}, {"type": kind, "text": text[3:]}]


#: Name of the format, the row, and settings; each is SYSTEM and USER with REFERENCE.
ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("messages", {"messages": [*CHAT, *turns("assistant", REFERENCE)]}, {}),
    ("messages", {"messages": CHAT, "answer": REFERENCE}, {"answer_key": "answer"}),
    (
        "messages",
        {
            "messages": [
                {"role": role, "content": part(text)}
                for role, text in (("system", SYSTEM), ("user", USER), ("assistant", REFERENCE))
            ]
        },
        {},
    ),
    (
        "messages",
        {
            "messages": [
                {"role": role, "content": [{"type": kind, "text": text, "image_url": None}]}
                for role, kind, text in (
                    ("system", "input_text", SYSTEM),
                    ("user", "input_text", USER),
                    ("assistant", "output_text", REFERENCE),
                )
            ]
        },
        {},
    ),
    ("messages", {"messages": [*CHAT, *turns("assistant", REFERENCE)], "prompt": USER}, {}),
    (
        "messages",
        {"messages": turns("user", USER, "assistant", REFERENCE), "system": SYSTEM, "prompt": None},
        {},
    ),
    (
        "messages",
        {
            "messages": [
                {**each, "tool_calls": None, "name": None, "weight": 1}
                for each in [*CHAT, *turns("assistant", REFERENCE)]
            ],
            "id": 5,
        },
        {"ignored_keys": ["id", "weight"]},
    ),
    ("prompt", {"prompt": USER, "system": SYSTEM, "a": REFERENCE}, {"answer_key": "a"}),
    ("prompt", {"prompt": [*CHAT, *turns("assistant", REFERENCE)]}, {}),
    ("prompt and completion", {"prompt": USER, "completion": REFERENCE, "system": SYSTEM}, {}),
    ("prompt and completion", {"prompt": CHAT, "completion": turns("assistant", REFERENCE)}, {}),
    (
        "conversations (ShareGPT)",
        {"conversations": [*SHARED, {"from": "gpt", "value": REFERENCE}]},
        {},
    ),
    (
        "conversations (ShareGPT)",
        {
            "conversations": [
                {"from": "human", "value": USER, "weight": None},
                {"from": "gpt", "value": REFERENCE, "weight": None},
            ],
            "system": SYSTEM,
        },
        {},
    ),
    ("conversations (ShareGPT)", {"conversations": [*CHAT, *turns("assistant", REFERENCE)]}, {}),
    (
        "conversation (ShareGPT)",
        {
            "conversation": {  # a sequence of structs, as older versions of datasets return it
                "from": ["system", "human", "gpt"],
                "value": [SYSTEM, USER, REFERENCE],
            }
        },
        {},
    ),
    (
        "instruction (Alpaca)",
        {"instruction": USER, "input": "", "output": REFERENCE, "system": SYSTEM, "text": "all"},
        {},
    ),
    (
        "instruction (Alpaca)",
        {"instruction": USER, "output": REFERENCE, "system_prompt": SYSTEM},
        {"answer_key": "output"},
    ),
    (
        "instruction (Alpaca)",
        {"instruction": "", "context": USER, "response": REFERENCE, "system": SYSTEM},
        {},
    ),
    (
        "data.question_key=question",
        {"question": USER, "answer": REFERENCE, "system": SYSTEM},
        {"question_key": "question", "answer_key": "answer"},
    ),
    (
        "data.question_key=chosen",
        {"chosen": [*CHAT, *turns("assistant", REFERENCE)], "rejected": []},
        {"question_key": "chosen", "ignored_keys": ["rejected"]},
    ),
]


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Write rows as a kind of file; return the settings that read them."""
    jsonl = write_lines(folder / "data.jsonl", rows)
    if kind == "jsonl":
        return {"prompts": jsonl}
    if kind == "json":
        path = folder / "data.json"
        path.write_text("\ufeff " + json.dumps(rows, indent=1), "utf-8")
        return {"prompts": path}
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        path = folder / "data.parquet"
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
        return {"prompts": path}
    if kind == "saved":
        path = folder / "saved"
        dataset_of(rows).with_format("numpy").save_to_disk(str(path))
        return {"prompts": path, "split": "train"}
    pytest.importorskip("datasets")
    path = folder / "dataset"
    path.mkdir()
    jsonl.rename(path / "data.jsonl")
    return {"prompts": path, "split": "train"}


def dataset_of(rows: list[dict[str, Any]], features: Any = None) -> Any:
    """Return a dataset; with a fingerprint, because not every pyarrow table can be hashed."""
    datasets, pyarrow = pytest.importorskip("datasets"), pytest.importorskip("pyarrow")
    schema = None if features is None else features.arrow_schema
    table = datasets.table.InMemoryTable(pyarrow.Table.from_pylist(rows, schema=schema))
    info = datasets.DatasetInfo(features=features)
    return datasets.Dataset(table, info=info, fingerprint="tests")


def texts(prompt: Prompt) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in prompt.messages]


def test_every_format_has_a_row() -> None:
    assert {each.name for each in FORMATS} <= {name for name, _, _ in ROWS}


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "saved", "dataset"])
def test_every_format_gives_the_same_prompt(tmp_path: Path, kind: str) -> None:
    for number, (name, row, settings) in enumerate(ROWS):
        folder = tmp_path / str(number)
        folder.mkdir()
        values = {**write(folder, kind, [row, row]), **settings}
        for source in ("rollout", "answers"):
            config = DataConfig(**values, source=source)
            prompt, second = read_prompts(config, ["math"])
            assert (prompt.format, prompt.messages) == (name, second.messages), row
            assert texts(prompt) == [("system", SYSTEM), ("user", USER)], row
            if source == "rollout":
                assert (prompt.answer, dict(prompt.metadata)) == (None, {"answer": REFERENCE})
            else:
                assert prompt.answer == REFERENCE


def test_instruction_and_input_are_joined_by_a_blank_line(tmp_path: Path) -> None:
    first, second, third = read(
        tmp_path,
        {"instruction": "Add.", "input": "3 4"},
        {"instruction": "Add 3 and 4.", "input": None, "output": None},
        {"instruction": "", "input": "3 + 4"},
        default_teacher="math",
    )
    contents = [each.messages[0].content for each in (first, second, third)]
    assert contents == ["Add.\n\n3 4", "Add 3 and 4.", "3 + 4"]
    assert not any(each.metadata for each in (first, second, third))


def test_formats_may_be_mixed_and_the_error_names_line_and_format(tmp_path: Path) -> None:
    lines = [
        {"prompt": USER},
        {"instruction": USER},
        {"conversations": SHARED},
        {"instruction": 5},
    ]
    assert len(read(tmp_path, *lines[:-1], default_teacher="math")) == 3
    with pytest.raises(DataError, match=r":4: format instruction \(Alpaca\): ") as caught:
        read(tmp_path, *lines, default_teacher="math")
    assert caught.value.key == f"{tmp_path / 'data.jsonl'}:4"


def picture(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, kind: {"url": "x"}}]}]


#: A row that no format accepts, what the error names, and the settings that it suggests.
REJECTED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": picture("image_url")}, "images", "data.on_bad_line=skip"),
    ({"messages": picture("image")}, "images", "data.on_bad_line=skip"),
    ({"prompt": picture("input_audio")}, "audio", "data.on_bad_line=skip"),
    ({"messages": picture("thinking")}, "thinking", "data.on_bad_line=skip"),
    ({"prompt": USER, "images": ["x"]}, "images", "data.on_bad_line=skip"),
    ({"prompt": USER, "audio": {"path": "x"}}, "audio", "data.on_bad_line=skip"),
    ({"prompt": USER, "tools": ["x"]}, "tools", "data.ignored_keys=[tools]"),
    (
        {"messages": [{"role": "user", "content": USER, "tool_calls": [1]}]},
        "tool_calls",
        "data.ignored_keys=[tool_calls]",
    ),
    ({"messages": [*CHAT], "system": "be long"}, "system", "data.ignored_keys=[system]"),
    (
        {"prompt": USER, "chosen": "x", "rejected": "y"},
        "preference",
        "data.ignored_keys=[chosen,rejected]",
    ),
    (
        {"chosen": CHAT, "rejected": CHAT},
        "chosen",
        "data.question_key=chosen data.ignored_keys=[rejected]",
    ),
    ({"chosen": "x", "rejected": "y"}, "preference", "data.on_bad_line=skip"),
    (
        {"question": USER, "answer": REFERENCE},
        "question",
        " ".join(("data.question_key=question", "data.answer_key=answer")),
    ),
    ({"Question": USER}, "Question", "data.question_key=Question"),
    (
        {"problem": USER, "solution": REFERENCE, "level": 3},
        "problem",
        "data.question_key=problem data.answer_key=solution data.ignored_keys=[level]",
    ),
    (
        {"messages": turns("user", "?", "assistant", "!"), "problem": "?", "solution": "!"},
        "problem, solution",
        "data.ignored_keys=[problem,solution]",
    ),
    (
        {"conversations": turns("user", "?"), "solution": "!", "id": 1},
        "solution",
        "data.answer_key=solution data.ignored_keys=[id]",
    ),
    ({"mesages": CHAT}, "mesages", "data.question_key=mesages"),
    ({"id": 7, "body": "?"}, "body", "data.question_key=body data.ignored_keys=[id]"),
    (
        {"body": "?", "response": "!", "id": 1},
        "body",
        "data.answer_key=response data.question_key=body data.ignored_keys=[id]",
    ),
    ({"text": "plain"}, "text", "data.question_key=text"),
    ({"prompt": USER, "answer": REFERENCE}, "answer", "data.answer_key=answer"),
    (
        {"prompt": USER, "ability": "math", "extra_info": {"index": 3}},
        "ability",
        "data.ignored_keys=[ability,extra_info]",
    ),
    ({"prompt": USER, "data_source": "gsm8k"}, "gsm8k", "data.ignored_keys=[data_source]"),
    (
        {"conversations": [{"from": "observation", "value": USER}]},
        "observation",
        "data.on_bad_line=skip",
    ),
    ({"prompt": CHAT, "completion": CHAT}, "completion", "data.on_bad_line=skip"),
    ({"messages": json.dumps(CHAT)}, "messages", "data.on_bad_line=skip"),
    (
        {"conversations": {"from": ["human"], "value": [USER, USER]}},
        "conversations",
        "data.on_bad_line=skip",
    ),
]


@pytest.mark.parametrize(("row", "named", "settings"), REJECTED)
def test_rejected_row_is_named_and_accepted_with_the_suggested_settings(
    tmp_path: Path, row: dict[str, Any], named: str, settings: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, row, teachers=["math"])
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'data.jsonl'}:1: ")
    assert named in text
    assert text.endswith(f"et {settings}.")
    valid = {"prompt": USER}
    values: dict[str, Any] = {}
    for setting in settings.split():
        key, _, value = setting.removeprefix("data.").partition("=")
        values[key] = value[1:-1].split(",") if value.startswith("[") else value
    lines = [row] if "on_bad_line" not in values else [row, valid]
    assert len(read(tmp_path, *lines, teachers=["math"], **values)) == 1


def test_suggested_keys_include_those_already_ignored(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.ignored_keys=\[id,level\]\.$"):
        read(tmp_path, {"prompt": USER, "level": 1, "id": 2}, ignored_keys=["id"])


def test_ignored_key_is_not_read(tmp_path: Path) -> None:
    row = {"messages": turns("user", "no"), "prompt": USER, "system": "no", "teacher": "math"}
    [prompt] = read(tmp_path, row, ignored_keys=["messages", "system"])
    assert texts(prompt) == [("user", USER)]


def test_empty_prompts_are_counted_with_their_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = [
        {"prompt": ""},
        {"prompt": " \n\t"},
        {"messages": []},
        {"messages": turns("system", SYSTEM, "user", " ")},
        {"messages": turns("user", "", "assistant", REFERENCE)},
        {"instruction": "", "input": "", "output": REFERENCE},
        {"messages": [{"role": "user", "content": []}]},
    ]
    lines: list[object] = [{"prompt": USER}, *empty, {"prompt": USER}]
    with pytest.raises(DataError, match=r"one of 7 in 9 rows \(lines 2, 3, 4, 5, 6, 7, 8\)") as e:
        read(tmp_path, *lines, teachers=["math"])
    assert e.value.key == f"{tmp_path / 'data.jsonl'}:2"
    assert len(read(tmp_path, *lines, teachers=["math"], on_bad_line="skip")) == 2
    assert "7 empty prompts" in caplog.text
    assert error_line(tmp_path, {"prompt": ""}, {"prompt": 5}, default_teacher="math") == 2
    with pytest.raises(DataError, match="and 2 more"):
        read(tmp_path, *[{"prompt": ""}] * 10, default_teacher="math")


def test_different_reference_answers_of_a_row_are_invalid(tmp_path: Path) -> None:
    row = {"prompt": USER, "completion": REFERENCE, "a": "8"}
    config: dict[str, Any] = {"answer_key": "a", "default_teacher": "math"}
    assert error_line(tmp_path, row, source="answers", **config) == 1
    [prompt] = read(tmp_path, row, **config)
    assert prompt.metadata == {"answer": "8"}


def test_weights_of_a_parquet_column_may_be_null(tmp_path: Path) -> None:
    row = {"prompt": USER, "teacher": {"math": 0.5, "code": None}}
    [prompt] = read(tmp_path, row)
    assert prompt.teachers == {"math": 1.0}


@pytest.mark.parametrize("content", [b'[{"prompt": "?"}, 5]', b"[5", b"[[1]]"])
def test_invalid_array_of_json_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_prompts(DataConfig(prompts=path), ["math"])
    assert str(caught.value.key).startswith(str(path))


def test_media_of_a_dataset_are_not_decoded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "picture": datasets.Image(),
            "images": datasets.Sequence(datasets.Image()),
        }
    )
    broken = {"bytes": b"no image", "path": None}
    row = {"prompt": USER, "picture": broken, "images": [broken]}
    path = tmp_path / "saved"
    dataset_of([row], features).save_to_disk(str(path))
    config = DataConfig(prompts=path, split="train")
    with pytest.raises(DataError, match="images are not supported"):
        read_prompts(config, ["math"])
    ignored = config.model_copy(update={"ignored_keys": ("images", "picture")})
    [prompt] = read_prompts(ignored, ["math"])
    assert texts(prompt) == [("user", USER)]
