"""``TeacherPool``: services of several teachers, of which a few have their weights in memory."""

import logging
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import cast

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mopd_protocol.errors import ConfigError
from mopd_server.engines.registry import load_engine
from mopd_server.pool.reloadable_engine import ReleasableEngine, ReloadableEngine
from mopd_server.pool.residency import Residency
from mopd_server.scoring.batching import Lease
from mopd_server.scoring.service import TeacherService
from mopd_server.settings import PoolSettings, TeacherSettings

logger = logging.getLogger(__name__)

#: The engine whose weights can be released and loaded within a process.
_ENGINE = "transformers"


class TeacherPool:
    """Services by name; each has its own queue, manifest and metrics.

    Args:
        settings: of each teacher, by name.
        pool: number of resident teachers, longest wait.

    Raises:
        ConfigError: if a model cannot be loaded, or the engine cannot release its weights.
        DataError: if a tokenizer is unsupported.
    """

    def __init__(self, settings: Mapping[str, TeacherSettings], pool: PoolSettings) -> None:
        self._engines: dict[str, ReloadableEngine] = {}
        self.residency = Residency(
            settings,
            resident=pool.resident,
            max_wait=pool.max_wait_seconds,
            queued_tokens=lambda name: self.services[name].queued_tokens,
            swap=self._swap,
        )
        self.services = {name: self._load(name, each) for name, each in settings.items()}
        self._registry = CollectorRegistry()
        self._registry.register(_PoolMetrics(self))

    def exposition(self) -> bytes:
        """Return the pool's metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _load(self, name: str, settings: TeacherSettings) -> TeacherService:
        from mopd_server.scoring.tokenizer_loading import ServedTokenizer, load_tokenizer

        if settings.engine not in ("auto", _ENGINE):
            raise ConfigError(
                f"--models: not supported by engine {settings.engine} (found --engine "
                f"{settings.engine}, expected {_ENGINE}). Serve one model per process.",
                key="engine",
            )
        selected = replace(settings, engine=_ENGINE)
        tokenizer = ServedTokenizer.of(load_tokenizer(selected))
        table = tokenizer.requests.table
        engine = ReloadableEngine(lambda: cast(ReleasableEngine, load_engine(selected, table)))
        engine.release()  # loaded for its description; the warm-up loads it under a lease
        self._engines[name] = engine
        return TeacherService(tokenizer, engine, selected, lease=self._lease(name))

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
            queued.add_metric([name], self._pool.services[name].queued_tokens)
        yield from (swaps, seconds, resident, queued)
