"""Gateways: in front of a stock vLLM server, and as processes of the command line."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from mopd_client.tokenizers.pretrained import load_tokenizer
from mopd_protocol.errors import ConfigError
from mopd_protocol.samples import Message
from mopd_server.app import create_app
from mopd_server.settings import GatewaySettings, TranslationSettings
from mopd_server.translation.loading import load_gateway
from mopd_server.translation.remote_engine import RemoteEngine
from tests import tiny_models
from tests.client.scripted_vllm import ScriptedVllm
from tests.processes import interpreter, line_with
from tests.server.translation.translated_teachers import (
    IdentityTranslator,
    rows_of,
    translated,
)

USER = [Message(role="user", content="3 + 4 =")]
STUDENT = TranslationSettings(student="same", teacher_top_k=16)


@pytest.mark.anyio
class TestStockServer:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> str:
        tiny_models.digit_tokenizer().save_pretrained(tmp_path)
        return str(tmp_path)

    @pytest.fixture
    def server(self, folder: str) -> ScriptedVllm:
        tokenizer = load_tokenizer(folder)
        return ScriptedVllm(tokenizer.tokenizer, width=tokenizer.table.size)

    @pytest.fixture
    def service(self, server: ScriptedVllm, folder: str) -> Any:
        address = GatewaySettings(teacher="http://vllm", teacher_kind="vllm", tokenizer=folder)
        service = load_gateway(address, STUDENT, {"transport": server.transport})
        service.warm_up()
        yield service
        service.close()

    async def test_rows_are_those_of_the_server(self, server: ScriptedVllm, service: Any) -> None:
        prompts = translated(service, IdentityTranslator())
        prompt = prompts.render(USER)
        end = service.tokenizer.table.roles.end_of_turn
        ids = [*prompt, *service.tokenizer.encoder.encode("it is 7"), end]

        rows = await rows_of(create_app(service), ids)

        assert rows[: len(prompt)] == [None] * len(prompt)
        for position in range(len(prompt), len(ids)):
            row = server.row(ids[:position])
            values = {token: entry["logprob"] for token, entry in rows[position].items()}
            likeliest = row.argsort()[::-1][:4]
            assert {int(token) for token in values} == {*likeliest.tolist(), ids[position]}
            for token, value in values.items():
                assert value == pytest.approx(row[int(token)], abs=1e-5)

    def test_its_tokenizer_must_be_named(self, server: ScriptedVllm) -> None:
        with pytest.raises(ConfigError) as caught:
            RemoteEngine(GatewaySettings(teacher="http://vllm", teacher_kind="vllm"), top_k=16)
        assert caught.value.key == "tokenizer"


@pytest.mark.process
def test_processes_translate_for_a_student(tmp_path: Path) -> None:
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    tokenizer = tiny_models.whole_number_tokenizer()
    tiny_models.save(tiny_models.gpt_neox(tokenizer), tokenizer, teacher)
    tiny_models.digit_tokenizer().save_pretrained(student)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "3 + 4 ="}')
    options = f"--student {student} --prompts {prompts} --port 0"
    own = load_tokenizer(str(student))
    rendered = own.render(USER)
    ids = own.tokenizer.encode(rendered, add_special_tokens=False).ids
    body = {"prompt": [*ids, *own.encoder.encode("7")], "max_tokens": 1, "prompt_logprobs": 4}
    serve = f"serve {teacher} --name math --device cpu --engine transformers {options}"
    coverages: list[Any] = []
    with interpreter("mopd_server.main", *serve.split()) as process:
        address = line_with(process, "address").split()[1]
        assert "for translation" in line_with(process, "student")
        line_with(process, "'math' is ready")
        translate = f"translate --teacher {address} {options}"
        with interpreter("mopd_server.main", *translate.split()) as gateway:
            addresses = [address, line_with(gateway, "address").split()[1]]
            line_with(gateway, "'math' is ready")
            for each in addresses:
                response = httpx.post(f"{each}/v1/completions", json=body, timeout=600)
                assert response.status_code == 200, response.text
                coverages.append(response.json()["choices"][0]["mopd_coverage"])
                manifest = httpx.get(f"{each}/v1/manifest", timeout=600).json()
                assert manifest["translation"]["student"] == str(student)
            gateway.terminate()
            assert gateway.wait(timeout=600) == 0
        process.terminate()
        assert process.wait(timeout=600) == 0
    assert coverages[0] == coverages[1]
    assert coverages[0]["prompt_tokens"] == len(ids)
