"""Tests of LoRA adapters as teachers, against models that they are merged into."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mopd_client import TeacherClient
from mopd_protocol.errors import ConfigError, WeightsError
from mopd_protocol.requests import SequenceRequest
from mopd_server.app import create_app
from mopd_server.engines.adapters import load_adapters
from mopd_server.engines.base import ScoringTask
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import TeacherSettings
from tests import tiny_models
from tests.server.compatible.expected_rows import send
from tests.server.tiny_teachers import get, problem

peft = pytest.importorskip("peft")

NUMBER = 8
SEQUENCE = {"prompt": "the quick", "completion": " brown fox jumps over 12"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a base model, of adapters ``a0``… and of merged models ``m0``…"""
    root = tmp_path_factory.mktemp("adapters")
    tokenizer = tiny_models.digit_tokenizer()
    tiny_models.save(tiny_models.qwen(tokenizer), tokenizer, root / "base")
    for number in range(NUMBER):
        model = AutoModelForCausalLM.from_pretrained(root / "base")
        torch.manual_seed(number)
        modules = ["q_proj", "down_proj", *(["lm_head"] if number % 3 == 1 else [])]
        config = peft.LoraConfig(
            r=2 + number, lora_alpha=8, target_modules=modules, init_lora_weights=False
        )
        adapted = peft.get_peft_model(model, config)
        adapted.save_pretrained(root / f"a{number}", save_embedding_layers=False)
        tiny_models.save(adapted.merge_and_unload(), tokenizer, root / f"m{number}")
    return root


def service_of(model: Path, *adapters: str) -> TeacherService:
    service = TeacherService.load(
        TeacherSettings(model=str(model), engine="transformers", device="cpu", adapter=adapters)
    )
    service.warm_up()
    assert service.ready, service.failure
    return service


@pytest.fixture(scope="module")
def service(folders: Path) -> Iterator[TeacherService]:
    adapters = [f"teacher.{number}={folders / f'a{number}'}" for number in range(NUMBER)]
    loaded = service_of(folders / "base", *adapters)
    yield loaded
    loaded.close()


def test_a_peft_older_than_transformers_requires_is_refused(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mopd_server.engines.model_adapters.MIN_PEFT_VERSION", "999.0")
    with pytest.raises(ConfigError, match=r"999\.0") as raised:
        service_of(folders / "base", f"a={folders / 'a0'}")
    assert raised.value.key == "adapter"


def test_adapters_equal_merged_models(service: TeacherService, folders: Path) -> None:
    draw = np.random.default_rng(0)
    prompt = draw.integers(5, 300, 40).astype(np.int32)
    rows = [draw.integers(5, 300, 9).astype(np.int32) for _ in range(3)]
    plain = [ScoringTask(prompt, each) for each in rows]  # share a prompt
    plain.append(ScoringTask(prompt[:3], rows[0], tuple(rows)[:1] * 9))
    names = [None, *(f"teacher.{number}" for number in range(NUMBER))]
    tasks = [replace(task, adapter=name) for task in plain for name in names]
    size: Any = {"top_k": 20, "temperature": 1.0}
    scores = iter(service._engine.score(tasks, **size))
    models = [folders / "base", *(folders / f"m{number}" for number in range(NUMBER))]
    separate = [service_of(model)._engine.score(plain, **size) for model in models]
    differences: list[float] = []
    for index in range(len(plain)):
        for expected in separate:
            adapted = next(scores)
            for name in ("token_logprobs", "logprobs"):
                left, right = getattr(adapted, name), getattr(expected[index], name)
                np.testing.assert_allclose(left, right, atol=1e-5, rtol=1e-5)
            differences.append(
                abs(adapted.token_logprobs - separate[0][index].token_logprobs).max()
            )
    assert sorted(differences)[len(plain)] > 1e-2  # all but the base model's


def test_weights_are_those_of_one_model_and_the_adapters(
    service: TeacherService, folders: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(folders / "base").num_parameters()
    parameters = {id(p): p.numel() for p in service._engine._model.parameters()}
    added = sum(
        tensor.numel()
        for number in range(NUMBER)
        for tensor in load_file(folders / f"a{number}" / "adapter_model.safetensors").values()
    )
    assert sum(parameters.values()) == base + added


def test_each_adapter_is_a_teacher_at_its_own_address(service: TeacherService) -> None:
    app = create_app(service, api_keys=["secret"])
    headers = {"authorization": "Bearer secret"}
    ids: dict[str | None, str] = {}

    async def score(name: str | None) -> None:
        address = "http://teacher" + (f"/adapters/{name}" if name else "")
        transport = httpx.ASGITransport(app)
        async with TeacherClient(
            "math", [address], api_key="secret", transport=transport
        ) as client:
            await client.wait_until_ready(600)
            ids[name] = (await client.handshake()).manifest_id
            await client.tokenizer()
            (scored,) = await client.score([SequenceRequest(**SEQUENCE)], top_k=3)
            assert scored.manifest_id == ids[name] == service.manifests[name].manifest_id

    for name in (None, "teacher.0", "teacher.1"):
        asyncio.run(score(name))
    assert len({*ids.values()}) == 3
    cards = get(app, "/v1/models", headers).json()["data"]
    assert [card["id"] for card in cards] == ["base", *(f"teacher.{n}" for n in range(NUMBER))]
    own = get(app, "/adapters/teacher.1/v1/models", headers).json()["data"]
    assert [card["id"] for card in own] == ["teacher.1"]
    for path in ("/adapters/teacher.0/v1/manifest", "/adapters/no/v1/manifest"):
        problem(get(app, path), 401, "unauthorized")
    problem(get(app, "/adapters/no/v1/manifest", headers), 404, "not_found")
    problem(get(app, "/adapters/no", headers), 404, "not_found")


def test_compatible_routes_score_the_adapter_of_the_path_or_the_field(
    service: TeacherService,
) -> None:
    app = create_app(service)
    completions = {"prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 3}
    generate = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    for path, body, field in (
        ("/v1/completions", completions, "model"),
        ("/generate", generate, "lora_path"),
    ):

        def rows(prefix: str = "", path: str = path, **fields: Any) -> Any:
            response = send(app, prefix + path, fields)
            assert response.status_code == 200, response.text
            document = response.json()
            first = document.get("choices", [document])[0]
            return first.get("prompt_logprobs") or first["meta_info"]["input_token_logprobs"]

        base, name = rows(**body), "teacher.1"
        by_path = rows(f"/adapters/{name}", **body)
        assert by_path != base == rows(**body, **{field: "base"})
        assert by_path == rows(**body, **{field: name})
        assert by_path == rows(f"/adapters/{name}", **body, **{field: name})
        other = send(app, f"/adapters/{name}{path}", {**body, field: "teacher.0"})
        problem(other, 404, "not_found")


@pytest.mark.parametrize("change", ["peft_type", "r", None])
def test_invalid_adapters_are_errors(change: str | None, folders: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in (folders / "a0").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    load_adapters([f"a={folder}"])
    config = json.loads((folder / "adapter_config.json").read_text())
    if change is None:
        config["target_modules"] += ["v_proj"]  # whose tensors are missing
    else:
        config[change] = "IA3"
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError if change is None else ConfigError):
        service_of(folders / "base", f"a={folder}")


@pytest.mark.parametrize("pairs", [("a/b=x",), ("a=missing",), ("a={a0}", "a={a1}")])
def test_invalid_names_and_folders_are_errors(pairs: tuple[str, ...], folders: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_adapters([pair.format(a0=folders / "a0", a1=folders / "a1") for pair in pairs])
    assert caught.value.key == "adapter"
