"""Tests of the command line, and of a process from its start to SIGTERM."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from mopd_protocol.codec import decode_json
from mopd_server.main import (
    gateway_settings_of,
    main,
    parser,
    pool_settings_of,
    settings_of,
    translation_settings_of,
)
from mopd_server.process import serving
from mopd_server.process.listening import bound_socket
from mopd_server.settings import (
    GatewaySettings,
    ListenSettings,
    PoolSettings,
    TeacherSettings,
    TranslationSettings,
)
from tests import tiny_models
from tests.processes import interpreter, line_with

HEAVY = ("torch", "transformers", "fastapi", "pydantic", "numpy", "uvicorn")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = tiny_models.digit_tokenizer()
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen"
    return tiny_models.save(tiny_models.qwen(tokenizer), tokenizer, folder)


@pytest.mark.smoke
def test_help_has_an_example_and_imports_no_heavy_library() -> None:
    program = (
        "import sys; from mopd_server.main import parser; text = parser().format_help();"
        f"assert not set({HEAVY!r}) & set(sys.modules), set({HEAVY!r}) & set(sys.modules);"
        "sys.stdout.write(text)"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "mopd-teacher serve ./Qwen3-4B --name math" in process.stdout
    assert "curl" in process.stdout


def test_defaults_of_options_and_settings_are_equal() -> None:
    parsed = parser().parse_args(["serve", "some/model"])
    assert settings_of(parsed) == (TeacherSettings(model="some/model"), ListenSettings())


def test_options_of_a_pool_set_its_settings() -> None:
    line = "serve --models a=./a b=org/b=c --resident 2 --max-wait 3.5 --name n"
    parsed = parser().parse_args(line.split())
    models = (("a", "./a"), ("b", "org/b=c"))
    expected = PoolSettings(models=models, resident=2, max_wait_seconds=3.5)
    assert pool_settings_of(parsed) == expected
    assert pool_settings_of(parser().parse_args(["serve", "m"])) == PoolSettings()


def test_each_option_sets_its_setting() -> None:
    line = (
        "serve m --name n --engine transformers --revision r --dtype bfloat16 --device cuda:1 "
        "--max-model-len 9 --top-k-max 8 --max-batch-tokens 7 --max-queue-tokens 6 "
        "--key-weights a=2,b=0.5 "
        "--trust-remote-code --tensor-parallel-size 2 --pipeline-parallel-size 3 "
        "--data-parallel-size 4 --quantization fp8 --gpu-memory-utilization 0.5 "
        "--logits-mebibytes 5 --vllm-arg seed=1 --vllm-arg block_size=32 "
        "--adapter a=x --adapter b=y "
        "--host 0.0.0.0 --port 0 --api-key-file k --max-body-mebibytes 2 "
        "--request-timeout 1.5 --body-timeout 2.5 --drain-timeout 3.5 --key-tokens-per-minute 5 "
        "--key-requests-in-flight 4 --tls-certificate c --tls-key t --log-level debug "
        "--log-format json"
    )
    teacher, listen = settings_of(parser().parse_args(line.split()))
    assert teacher == TeacherSettings(
        model="m",
        name="n",
        engine="transformers",
        revision="r",
        dtype="bfloat16",
        device="cuda:1",
        max_model_len=9,
        top_k_max=8,
        max_batch_tokens=7,
        max_queue_tokens=6,
        trust_remote_code=True,
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        data_parallel_size=4,
        quantization="fp8",
        key_weights=(("a", 2.0), ("b", 0.5)),
        gpu_memory_utilization=0.5,
        logits_budget_bytes=5 * 1024 * 1024,
        vllm_arg=("seed=1", "block_size=32"),
        adapter=("a=x", "b=y"),
    )
    assert listen == ListenSettings(
        host="0.0.0.0",
        port=0,
        api_key_file=Path("k"),
        max_body_bytes=2 * 1024 * 1024,
        body_timeout_seconds=2.5,
        request_timeout_seconds=1.5,
        drain_seconds=3.5,
        key_tokens_per_minute=5,
        key_requests_in_flight=4,
        tls_certificate=Path("c"),
        tls_key=Path("t"),
        log_level="debug",
        log_format="json",
    )


def test_each_option_of_a_translation_sets_its_setting() -> None:
    line = (
        "--student s --student-revision r --prompts p --student-template-arg a=1 "
        "--student-template-arg b=x --teacher-template-arg c=2 --teacher-top-k 9 --extra-rounds 3 "
        "--extra-rows 8"
    )
    expected = TranslationSettings(
        student="s",
        student_revision="r",
        prompts=Path("p"),
        student_template_arg=("a=1", "b=x"),
        teacher_template_arg=("c=2",),
        teacher_top_k=9,
        extra_rounds=3,
        extra_rows=8,
    )
    serve = parser().parse_args(["serve", "m", *line.split()])
    assert translation_settings_of(serve) == expected
    assert translation_settings_of(parser().parse_args(["serve", "m"])) == TranslationSettings()
    own = (
        "--teacher http://t --name n --teacher-kind vllm --tokenizer t --teacher-key-file k "
        "--teacher-timeout 1.5 --teacher-wait 2.5 --max-concurrency 5 --max-queue-tokens 6"
    )
    translate = parser().parse_args(["translate", *own.split(), *line.split(), "--port", "7"])
    assert translation_settings_of(translate) == expected
    assert gateway_settings_of(translate) == GatewaySettings(
        teacher="http://t",
        name="n",
        teacher_kind="vllm",
        tokenizer="t",
        teacher_key_file=Path("k"),
        teacher_timeout_seconds=1.5,
        teacher_wait_seconds=2.5,
        max_concurrency=5,
        max_queue_tokens=6,
    )
    minimal = parser().parse_args(["translate", "--teacher", "http://t", "--student", "s"])
    assert gateway_settings_of(minimal) == GatewaySettings(teacher="http://t")


@pytest.mark.parametrize(
    "line",
    ["translate --teacher http://t", "translate --student s", "serve m --student s --models a=b"],
)
def test_a_translation_needs_one_teacher_and_a_student(line: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2


def test_several_teachers_have_no_student(capsys: pytest.CaptureFixture[str]) -> None:
    line = "serve --models a=./missing --student s --port 0"
    assert main(line.split()) == 1
    assert "--student" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--top-k-max", "0"],
        ["--port", "70000"],
        ["--dtype", "int8"],
        ["--gpu-memory-utilization", "1.5"],
        ["--drain-timeout", "inf"],
        ["--key-weights", "alice"],
        ["--models", "a"],
        ["--models", "a=b"],  # and a model
        ["--vllm-arg", "seed"],
        ["--adapter", "x="],
    ],
)
def test_invalid_option_is_a_usage_error(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["serve", "m", *options])
    assert caught.value.code == 2
    assert options[0] in capsys.readouterr().err


@pytest.fixture
def signals_restored() -> Iterator[None]:
    """``serve`` installs a handler of SIGTERM in this process."""
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.usefixtures("signals_restored")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["./no-such-model"], "'./no-such-model'"),
        (["FOLDER", "--api-key-file", "/no/keys"], "/no/keys"),
        (["FOLDER", "--host", "256.1.1.1.example"], "256.1.1.1.example"),
        (["FOLDER", "--tls-key", "k"], "--tls-certificate"),
        (["FOLDER", "--max-model-len", "9999"], "256"),
        (["FOLDER", "--key-tokens-per-minute", "9"], "--api-key-file"),
        (["FOLDER", "--key-weights", "alice=2"], "'alice'"),
    ],
)
def test_failed_start_is_status_1_with_a_message(
    options: list[str], text: str, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(model_folder) if option == "FOLDER" else option for option in options]
    assert main(["serve", *arguments, "--port", "0", "--device", "cpu"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("mopd-teacher: ") or "\nmopd-teacher: " in error
    assert text in error
    assert "Traceback" not in error


@pytest.mark.smoke
def test_port_in_use_is_reported_before_anything_slow_is_imported() -> None:
    program = (
        "import sys; from mopd_server.main import main;"
        "code = main(['serve', './no-such-model', '--port', sys.argv[1]]);"
        f"assert code == 1 and not set({HEAVY!r}) - {{'numpy'}} & set(sys.modules);"
        "import mopd_server.process.serving;"  # all that probes need
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    with bound_socket("127.0.0.1", 0) as bound:
        port = str(bound.getsockname()[1])
        command = [sys.executable, "-c", program, port]
        process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"mopd-teacher: cannot listen on 127.0.0.1:{port}: ")


def test_signal_delivered_to_another_thread_is_handled() -> None:
    """Python runs handlers in the main thread, which may be blocked at that time."""
    events: Any = queue.SimpleQueue()
    main_thread = threading.main_thread().ident
    assert main_thread is not None

    def receive_signal() -> None:
        while sys._current_frames()[main_thread].f_code is not serving._next_event.__code__:
            threading.Event().wait(0.001)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    previous = signal.signal(signal.SIGTERM, lambda number, frame: events.put("signal"))
    thread = threading.Thread(target=receive_signal)
    try:
        thread.start()
        assert serving._next_event(events) == "signal"
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.smoke
def test_process_serves_and_exits_cleanly_on_sigterm(model_folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    command = (
        f"serve {model_folder} --name math --port 0 --device cpu --engine transformers "
        f"--api-key-file {keys}"
    )
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    # The same command, with an engine that blocks at a gate if top_k is 19.
    program = ["tests.survival.unlucky_teacher", *command.split()]
    with interpreter(*program, ENGINE_WAITS_FOR=str(gate)) as process:
        assert "'math'" in line_with(process, "mopd teacher")
        assert "1 API keys" in line_with(process, "access")
        address = line_with(process, "address").split()[1]
        assert address.startswith("http://127.0.0.1:")
        line_with(process, "'math' is ready")
        with httpx.Client(
            base_url=address, headers={"Authorization": "Bearer secret"}, timeout=600
        ) as client:
            assert client.get("/readyz").json() == {"status": "ready"}
            manifest = client.get("/v1/manifest").json()
            assert (manifest["service"], manifest["model"]) == ("math", "tiny-qwen")
            body = {"sequences": [{"prompt": "the quick", "completion": " fox"}] * 6, "top_k": 19}
            with ThreadPoolExecutor(max_workers=1) as executor:
                request = executor.submit(client.post, "/v1/logprobs", json=body)
                while "mopd_requests_in_flight 1.0" not in client.get("/metrics").text:
                    assert not request.done(), "response before the gate is open"
                process.send_signal(signal.SIGTERM)
                while client.get("/readyz").status_code != 503:
                    pass
                gate.write_text("open")
                response = request.result()
            assert response.status_code == 200
            assert len(decode_json(response.json()).scores) == 6
        line_with(process, "stopped by SIGTERM")
        assert process.wait(timeout=600) == 0
