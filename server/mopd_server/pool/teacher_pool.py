"""``TeacherPool``: services of several teachers, of which a few have their weights in memory."""

import logging
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from multiprocessing import active_children
from typing import cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mopd_protocol.errors import ConfigError
from mopd_server.engines.base import AsyncEngine
from mopd_server.engines.registry import load_engine
from mopd_server.pool.reloadable_engine import ReleasableEngine, ReloadableEngine
from mopd_server.pool.residency import Residency
from mopd_server.scoring.batching import Lease
from mopd_server.scoring.service import STEPS_AHEAD, TeacherService
from mopd_server.settings import PoolSettings, TeacherSettings

logger = logging.getLogger(__name__)

#: Engine -> True if it runs in separate processes, so that several score at the same time. The
#: first one is selected by auto.
_ENGINES = {"transformers": False, "vllm": True}


class TeacherPool:
    """Services by name; each has its own queue, manifest and metrics.

    Args:
        settings: of each teacher, by name; all have the same engine.
        pool: number of resident teachers, longest wait.

    Raises:
        ConfigError: if the engine cannot release its weights.
    """

    def __init__(self, settings: Mapping[str, TeacherSettings], pool: PoolSettings) -> None:
        (engine,) = {each.engine for each in settings.values()}
        engine = next(iter(_ENGINES)) if engine == "auto" else engine
        if engine not in _ENGINES:
            raise ConfigError(
                f"--models: not supported by engine {engine} (found --engine {engine}, expected "
                f"{' or '.join(_ENGINES)}). Serve one model per process.",
                key="engine",
            )
        self._settings = {
            name: replace(each, engine=engine, pool_resident=pool.resident)
            for name, each in settings.items()
        }
        self._separate = _ENGINES[engine]
        self._engines: dict[str, ReloadableEngine] = {}
        self.services: dict[str, TeacherService] = {}
        """The teachers that are loaded; a resident one has its weights in memory."""
        self.residency = Residency(
            settings,
            resident=pool.resident,
            max_wait=pool.max_wait_seconds,
            concurrent=self._separate,
            queued_tokens=self.queued_tokens,
            swap=self._swap,
        )
        self._registry = CollectorRegistry()
        self._registry.register(_PoolMetrics(self))

    def load(self) -> Iterator[tuple[str, TeacherService]]:
        """Load the teachers one after the other; warm each one up before the next is loaded.

        Raises:
            ConfigError: if a model cannot be loaded.
            DataError: if a tokenizer is unsupported.
        """
        for name, settings in self._settings.items():
            self.services[name] = self._load(name, settings)
            yield name, self.services[name]

    def queued_tokens(self, name: str) -> int:
        """Return the tokens in the queue of a teacher."""
        return self.services[name].queued_tokens if name in self.services else 0

    def exposition(self) -> bytes:
        """Return the pool's metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """End all engines and their processes, after the batches in progress."""
        self.residency.close()
        if any(each.loading for each in self.residency.teachers.values()):
            for process in active_children():  # the start, which takes a minute, fails
                process.terminate()
        for service in self.services.values():
            service.close()
        for engine in self._engines.values():
            engine.close()

    def _load(self, name: str, settings: TeacherSettings) -> TeacherService:
        from mopd_server.scoring.tokenizer_loading import ServedTokenizer

        tokenizer = ServedTokenizer.read(settings)
        table = tokenizer.requests.table
        engine = self._engines[name] = ReloadableEngine(
            lambda: cast(ReleasableEngine | AsyncEngine, load_engine(settings, table))
        )
        with self.residency.lease(name, 0, 0):  # measures the load
            if engine.can_suspend:  # a fraction of the load, and measured by the next one
                self.residency.teachers[name].swap_seconds = 0.0
        # An asynchronous engine batches a batch internally.
        steps = STEPS_AHEAD if self._separate else 1
        service = TeacherService(
            tokenizer,
            engine,
            replace(settings, max_batch_tokens=steps * settings.max_batch_tokens),
            lease=self._lease(name),
            heartbeat=(lambda: engine.silent_seconds) if self._separate else None,
        )
        engine.on_crash = service.report_crash
        return service

    def _lease(self, name: str) -> Lease:
        return lambda tokens, batch_tokens: self.residency.lease(name, tokens, batch_tokens)

    def _swap(self, name: str, victim: str | None) -> None:
        if victim is not None:
            self._engines[victim].release()
        self._engines[name].load()
        logger.info("loaded teacher %r%s", name, f" instead of {victim!r}" if victim else "")


class _PoolMetrics(Collector):
    def __init__(self, pool: TeacherPool) -> None:
        self._pool = pool

    def collect(self) -> Generator[CounterMetricFamily | GaugeMetricFamily]:
        """Return one value per teacher."""
        teachers = self._pool.residency.teachers
        swaps = CounterMetricFamily(
            "mopd_pool_swaps", "Loads of a teacher's weights.", labels=["teacher"]
        )
        seconds = GaugeMetricFamily(
            "mopd_pool_swap_seconds", "Duration of a teacher's last load.", labels=["teacher"]
        )
        resident = GaugeMetricFamily(
            "mopd_pool_resident", "1 while a teacher's weights are in memory.", labels=["teacher"]
        )
        queued = GaugeMetricFamily(
            "mopd_pool_queue_tokens", "Tokens in a teacher's queue.", labels=["teacher"]
        )
        for name, teacher in teachers.items():
            swaps.add_metric([name], teacher.swaps)
            seconds.add_metric([name], teacher.swap_seconds)
            resident.add_metric([name], teacher.resident)
            queued.add_metric([name], self._pool.queued_tokens(name))
        yield from (swaps, seconds, resident, queued)
