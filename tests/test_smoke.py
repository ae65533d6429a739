"""Whole runs over HTTP in separate processes, on one rank and on two."""

from pathlib import Path

import pytest

from tests import processes
from tests.broker import Broker
from tests.ports import free_port
from tests.trainer.conftest import models
from tests.trainer.runs import prompt_lines, run_values, write_lines, write_run
from tests.trainer.whole_runs import journal

__all__ = ["models"]

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("size", [1, 2])
def test_mopd_train_learns_from_two_teacher_services(
    size: int, tmp_path: Path, models: dict[str, Path], broker: Broker
) -> None:
    write_lines(tmp_path / "prompts.jsonl", prompt_lines(5))
    values = run_values(tmp_path)
    values["student"] |= {"model": str(models["student"]), "sharding": "none"}
    addresses = broker.serve({name: models[name] for name in ("math", "code")})
    values["teachers"] = {n: {"url": address, "top_k": 8} for n, address in addresses.items()}
    if size > 1:
        values["student"]["sharding"] = "ddp"
    path = write_run(tmp_path, values)
    group = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [
        processes.start(
            "mopd",
            *("train", path),
            stdout=tmp_path / f"stdout-{rank}.log",
            stderr=tmp_path / f"stderr-{rank}.log",
            environment={n: str(v) for n, v in {"RANK": rank, "LOCAL_RANK": rank, **group}.items()},
        )
        for rank in range(size)
    ]
    try:
        assert [rank.wait() for rank in ranks] == [0] * size, ranks[0].stderr.read_text()
    finally:
        for rank in ranks:
            rank.kill()
    assert "step 2/2  loss " in ranks[0].stdout.read_text()
    assert [line["step"] for line in journal(tmp_path / "run")] == [1, 2]
    assert all(line["loss"] > 0 for line in journal(tmp_path / "run"))
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
