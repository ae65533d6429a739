"""Teacher services for a whole test session, started when a test first needs them."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.ports import free_port
from tests.survival.running_teacher import RunningTeacher, running_teacher

#: Services that run at a time; the one used longest ago is stopped for another.
_MOST = 3

_Key = tuple[str, Path]


class Broker:
    """Services by teacher name and model folder; each keeps its address when it is restarted."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._ports: dict[_Key, int] = {}
        self._running: dict[_Key, tuple[RunningTeacher, ExitStack]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        while self._running:
            self._stop(next(iter(self._running)))

    def serve(self, models: Mapping[str, Path]) -> dict[str, str]:
        """Teacher name -> address of a service that is ready to score.

        Services of other models may be stopped for it; request their addresses again in the test
        that uses them (a fixture of function scope does).
        """
        assert len(models) <= _MOST
        keys = {name: (name, Path(folder)) for name, folder in models.items()}
        for key, (teacher, _) in [*self._running.items()]:
            if teacher.process.poll() is not None:
                self._stop(key)
        for key in keys.values():
            if key in self._running:
                self._running[key] = self._running.pop(key)  # the latest used is last
        missing = [key for key in keys.values() if key not in self._running]
        while len(self._running) + len(missing) > _MOST:
            self._stop(next(key for key in self._running if key not in keys.values()))
        for key in missing:
            self._start(key)
        for key in missing:
            self._running[key][0].until("/readyz", 200)
        return {name: self._running[key][0].url for name, key in keys.items()}

    def _start(self, key: _Key) -> None:
        name, folder = key
        port = self._ports.setdefault(key, free_port())
        stack = ExitStack()
        log = self._log_folder / f"{name}-{port}.log"
        teacher = stack.enter_context(
            running_teacher(folder, log, name=name, port=port, ready=False)
        )
        self._running[key] = (teacher, stack)

    def _stop(self, key: _Key) -> None:
        _, stack = self._running.pop(key)
        stack.close()
