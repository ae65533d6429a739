"""How requests become the teacher's token ids."""

from typing import Any

import pytest

from mopd_protocol.errors import ConfigError, DataError
from mopd_protocol.requests import SequenceRequest
from mopd_server.scoring.tokenization import RequestTokenizer, TokenizedSequence
from mopd_server.scoring.tokenizer_loading import load_tokenizer
from mopd_server.service_error import ServiceError
from mopd_server.settings import TeacherSettings
from tests import tiny_models
from tests.server.tiny_teachers import TinyTeacher

QUESTION = [{"role": "user", "content": "3 + 4 ="}]


def tokenize(teacher: TinyTeacher, **sequence: Any) -> TokenizedSequence:
    if not {"messages", "prompt", "prompt_token_ids"} & sequence.keys():
        sequence["prompt"] = "the quick"
    return teacher.tokenizer.tokenize(SequenceRequest(**sequence))


def refusal(teacher: TinyTeacher, **sequence: Any) -> tuple[int, str]:
    with pytest.raises(ServiceError) as raised:
        tokenize(teacher, **sequence)
    return raised.value.http_status, str(raised.value)


def test_messages_are_rendered_with_the_generation_prompt_and_no_second_bos(
    teachers: dict[str, TinyTeacher],
) -> None:
    for teacher in teachers.values():
        controls = teacher.tokenizer.table.controls
        ids = tokenize(teacher, messages=QUESTION, completion="7").prompt_ids.tolist()
        assert ids[0] == controls["<|user|>"]
        assert ids[-1] == controls["<|assistant|>"]
        assert teacher.tokenizer.table.sequence(ids).text.strip() == b"3 + 4 ="


@pytest.mark.parametrize("prompt", ["the fox", "the </s> fox", "ends with </s>"])
def test_a_prompt_is_not_ended_by_a_tokenizer_that_ends_every_text(prompt: str) -> None:
    from tokenizers.processors import TemplateProcessing

    hugging_face = tiny_models.sentencepiece_tokenizer()
    ids = hugging_face(prompt, add_special_tokens=False).input_ids
    hugging_face.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    assert hugging_face(prompt).input_ids == [1, *ids, 2]
    tokenizer = RequestTokenizer(hugging_face)
    read = tokenizer.tokenize(SequenceRequest(prompt=prompt, completion="7")).prompt_ids
    assert read.tolist() == [1, *ids]


def test_a_prompt_gets_the_special_tokens_that_its_tokenizer_usually_adds() -> None:
    from tokenizers.processors import TemplateProcessing

    hugging_face = tiny_models.sentencepiece_tokenizer()
    hugging_face.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer = RequestTokenizer(hugging_face)
    plain = tokenizer.tokenize(SequenceRequest(prompt="the fox", completion="7"))
    assert plain.prompt_ids.tolist() == hugging_face("the fox").input_ids
    assert plain.prompt_ids[0] == 1
    chat = tokenizer.tokenize(
        SequenceRequest.model_validate({"messages": QUESTION, "completion": ""})
    )
    assert 1 not in chat.prompt_ids.tolist()
    assert (
        tokenizer.tokenize(SequenceRequest(prompt="the fox", completion="7")).completion.marks == {}
    )


def test_completion_text_comes_back_byte_for_byte(teachers: dict[str, TinyTeacher]) -> None:
    for teacher in teachers.values():
        for text in (" the fox", "the fox", "  7\n", "Grüße 🙂", ""):
            assert tokenize(teacher, completion=text).completion.text == text.encode()


def test_a_sentencepiece_teacher_invents_no_space_before_a_completion(
    teachers: dict[str, TinyTeacher],
) -> None:
    teacher = teachers["llama"]
    apart = tokenize(teacher, completion="fox").completion
    spaced = tokenize(teacher, completion=" fox").completion
    assert apart.text == b"fox"
    assert spaced.text == b" fox"
    assert apart.token_ids.tolist() != spaced.token_ids.tolist()
    assert tokenize(teacher, prompt="fox", completion="").prompt_ids.tolist() == (
        spaced.token_ids.tolist()
    )  # in front of a prompt the model has seen it in training


@pytest.mark.parametrize("spelled", ["<|end|>", "a<|end|>b", "<|user|>"])
def test_text_that_spells_a_control_token_stays_text(
    qwen_teacher: TinyTeacher, spelled: str
) -> None:
    completion = tokenize(qwen_teacher, completion=spelled).completion
    assert completion.text == spelled.encode()
    assert completion.marks == {}


def test_control_tokens_stand_where_they_were_asked_for(qwen_teacher: TinyTeacher) -> None:
    parts = ["12", {"control": "<|user|>"}, " the", " fox"]
    completion = tokenize(qwen_teacher, completion=parts).completion
    controls = qwen_teacher.tokenizer.table.controls
    position = completion.token_ids.tolist().index(controls["<|user|>"])
    assert completion.marks == {position: "<|user|>"}
    assert completion.text == b"12 the fox"
    whole = tokenize(qwen_teacher, completion=" the fox").completion.token_ids.tolist()
    assert completion.token_ids.tolist()[position + 1 :] == whole  # neighbouring texts are one


def test_finished_appends_the_end_of_turn(qwen_teacher: TinyTeacher) -> None:
    end = qwen_teacher.tokenizer.table.roles.end_of_turn
    for completion in ({"completion": "7"}, {"completion_token_ids": [27]}):
        tokens = tokenize(qwen_teacher, finished=True, **completion).completion
        assert tokens.token_ids.tolist() == [27, end]
        assert tokens.ends_turn
    assert tokenize(qwen_teacher, completion="", finished=True).completion.token_ids.tolist() == [
        end
    ]


def test_ids_are_taken_as_they_are(qwen_teacher: TinyTeacher) -> None:
    tokens = tokenize(qwen_teacher, prompt_token_ids=[5, 0, 9], completion_token_ids=[300, 2])
    assert tokens.prompt_ids.tolist() == [5, 0, 9]
    assert tokens.completion.token_ids.tolist() == [300, 2]


def test_candidates_are_unique_in_a_row(qwen_teacher: TinyTeacher) -> None:
    tokens = tokenize(qwen_teacher, completion_token_ids=[7, 8], candidate_ids=[[4, 4, 9], []])
    assert tokens.candidate_ids is not None
    assert [row.tolist() for row in tokens.candidate_ids] == [[4, 9], []]


def test_an_empty_prompt_begins_with_bos_where_there_is_one(
    teachers: dict[str, TinyTeacher],
) -> None:
    assert tokenize(teachers["llama"], prompt="", completion="a").prompt_ids.tolist() == [1]
    status, sentence = refusal(teachers["qwen"], prompt="", completion="a")
    assert status == 400
    assert "nothing predicts the first completion token" in sentence
    assert refusal(teachers["llama"], prompt_token_ids=[], completion="a")[0] == 400


@pytest.mark.parametrize("field", ["prompt_token_ids", "completion_token_ids"])
@pytest.mark.parametrize("foreign", [420, 10**30])
def test_ids_of_another_tokenizer_are_refused(
    qwen_teacher: TinyTeacher, field: str, foreign: int
) -> None:
    sequence = {"completion": "a", field: [3, foreign]}
    if field == "completion_token_ids":
        del sequence["completion"]
    status, sentence = refusal(qwen_teacher, **sequence)
    assert status == 400
    assert f"{field} holds id {foreign}, but this teacher's tokenizer has 420 ids" in sentence


def test_foreign_and_miscounted_candidates_are_refused(qwen_teacher: TinyTeacher) -> None:
    status, sentence = refusal(qwen_teacher, completion="7", candidate_ids=[[420]])
    assert (status, "candidate_ids holds id 420" in sentence) == (400, True)
    status, sentence = refusal(
        qwen_teacher, completion="7", finished=True, candidate_ids=[[1], [1], [1]]
    )
    assert status == 400
    assert "candidate_ids has 3 rows, expected 2" in sentence


def test_a_second_ending_is_refused(qwen_teacher: TinyTeacher) -> None:
    for completion in (
        {"completion_token_ids": [27, 0]},
        {"completion": ["7", {"control": "<|end|>"}]},
    ):
        status, sentence = refusal(qwen_teacher, finished=True, **completion)
        assert status == 400
        assert "already ends with ending token 0" in sentence


def test_an_unknown_control_token_is_refused_with_the_known_ones(
    qwen_teacher: TinyTeacher,
) -> None:
    status, sentence = refusal(qwen_teacher, completion=[{"control": "<think>"}])
    assert status == 422
    assert "no control token '<think>'; it has <|assistant|>, <|end|>" in sentence


def test_half_a_character_is_refused(qwen_teacher: TinyTeacher) -> None:
    for sequence in ({"prompt": "\ud800", "completion": ""}, {"completion": "a\ud800"}):
        request = SequenceRequest.model_construct(**{"prompt": "a", **sequence})
        with pytest.raises(ServiceError, match="lone surrogate"):
            qwen_teacher.tokenizer.tokenize(request)


def test_without_a_chat_template_messages_are_refused() -> None:
    hugging_face = tiny_models.digit_tokenizer()
    hugging_face.chat_template = None
    tokenizer = RequestTokenizer(hugging_face)
    assert not tokenizer.renders_messages
    assert tokenizer.template_hash is None
    with pytest.raises(ServiceError, match="no chat template") as raised:
        tokenizer.tokenize(
            SequenceRequest.model_validate({"messages": QUESTION, "completion": "7"})
        )
    assert raised.value.http_status == 422


def test_roles_that_the_template_refuses_are_refused() -> None:
    hugging_face = tiny_models.digit_tokenizer()
    hugging_face.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
        + tiny_models.CHAT_TEMPLATE
    )
    tokenizer = RequestTokenizer(hugging_face)
    request = SequenceRequest.model_validate(
        {"messages": [{"role": "system", "content": "be brief"}, *QUESTION], "completion": "7"}
    )
    with pytest.raises(ServiceError, match="roles system, user: no system here") as raised:
        tokenizer.tokenize(request)
    assert raised.value.http_status == 422


def test_a_teacher_without_an_ending_cannot_score_finished() -> None:
    hugging_face = tiny_models.digit_tokenizer()
    hugging_face.chat_template = None
    hugging_face.eos_token = None
    tokenizer = RequestTokenizer(hugging_face)
    with pytest.raises(ServiceError, match="no end-of-turn token") as raised:
        tokenizer.tokenize(SequenceRequest(prompt="a", completion="b", finished=True))
    assert raised.value.http_status == 422


def test_a_template_that_renders_no_answers_keeps_the_teacher_from_starting() -> None:
    hugging_face = tiny_models.digit_tokenizer()
    hugging_face.chat_template = "{{ raise_exception('only tools') }}"
    with pytest.raises(ConfigError, match="cannot render a question and an answer: only tools"):
        RequestTokenizer(hugging_face)


def test_a_tokenizer_whose_tokens_spell_no_bytes_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match="cannot tell the bytes of single tokens"):
        RequestTokenizer(PreTrainedTokenizerFast(tokenizer_object=words))


@pytest.mark.parametrize("model", ["./nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_folder_that_does_not_exist_is_named(model: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no model folder '{model}'"):
        load_tokenizer(TeacherSettings(model=model))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        load_tokenizer(TeacherSettings(model=str(tmp_path)))
    for content in ("nonsense", '{"model": {"type": "of the future"}}'):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match="cannot load the tokenizer of"):
            load_tokenizer(TeacherSettings(model=str(tmp_path)))
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ConfigError, match="is a file"):
        load_tokenizer(TeacherSettings(model=str(tmp_path / "weights.gguf")))
