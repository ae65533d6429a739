"""Connect to the teachers of a run: handshakes, tokenizers, projections."""

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from mopd_client.pool import ScoringClient, TeacherPool
from mopd_client.score_store import ScoreStore
from mopd_client.services.expectation import Expectation
from mopd_client.services.kinds import SERVICE_KINDS
from mopd_client.teacher_client import TeacherClient
from mopd_losses.config import AutoConfig, PrefixKlConfig
from mopd_losses.projection.cache import ProjectionCache
from mopd_losses.projection.control_tokens import ControlTokens
from mopd_losses.projection.matrix import ProjectionMatrix
from mopd_losses.projection.sides import find_projection, resolve_loss
from mopd_protocol.errors import ConfigError, TeacherMismatchError
from mopd_protocol.manifest import Manifest
from mopd_protocol.request_tokenizer import TeacherTokenizer
from mopd_protocol.runtime.model_revision import folder_name
from mopd_trainer.config.teacher import ScoreCacheConfig, TeacherConfig
from mopd_trainer.student.identity import StudentIdentity
from mopd_trainer.teachers.local.client import LocalTeacher, TeacherLock
from mopd_trainer.teachers.local.manifest import device_kind
from mopd_trainer.teachers.stored.client import StoredTeacher

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Teacher:
    """A teacher after the handshake."""

    name: str
    config: TeacherConfig
    manifest: Manifest
    tokenizer: TeacherTokenizer
    projection: ProjectionMatrix
    student: StudentIdentity
    path: str | None = None
    """Path of the scoring route; None without a server, as in a replay."""

    @cached_property
    def controls(self) -> ControlTokens:
        """The control tokens of both sides in pairs."""
        return ControlTokens.of(self.student.table, self.tokenizer.table)

    @property
    def has_one_tokenizer(self) -> bool:
        """True if the tokenizer is the student's."""
        return self.tokenizer.table.fingerprint == self.student.table.fingerprint

    @property
    def has_recommended_loss(self) -> bool:
        """True if the loss is of the type that ``auto`` selects."""
        selected = AutoConfig().resolved(same_tokenizer=self.has_one_tokenizer)
        return self.config.loss.type == selected.type

    def differing_ends(self) -> str | None:
        """Name the tokens that end completions of either side; None if these are the same."""
        sides = self.student.table, self.tokenizer.table
        own, others = ([*map(table.name_of, table.roles.ending)] for table in sides)
        if {*own} == {*others}:
            return None
        return (
            f"student ends with {_listed(own)}, teacher {self.name!r} with {_listed(others)}: "
            "compared as one event"
        )

    @property
    def lookaheads(self) -> int:
        """Most lookaheads of a completion that its loss compares."""
        loss = self.config.loss
        return loss.lookaheads if isinstance(loss, PrefixKlConfig) else 0

    @property
    def lookahead_rounds(self) -> int:
        """Most times that each of them is scored, with more of what the teacher is sure of."""
        loss = self.config.loss
        return loss.lookahead_rounds if isinstance(loss, PrefixKlConfig) else 0


def teacher_pool(
    configs: Mapping[str, TeacherConfig],
    score_cache: ScoreCacheConfig | None = None,
    *,
    lock: TeacherLock | None = None,
    device: str = "auto",
    seed: int = 0,
) -> TeacherPool:
    """Create a client per teacher, without sending a request or loading a model.

    Args:
        lock: of the local teachers; receives their models later.
        device: the student's.
        seed: of the sequences that are scored again to verify them.

    Raises:
        ConfigError: when the environment variable of an API key is not set, or the cache folder is
            not writable.
    """
    cache = None
    if score_cache is not None:
        cache = ScoreStore(score_cache.path, max_bytes=int(score_cache.max_gigabytes * 1e9))
    lock = lock or TeacherLock()
    return TeacherPool(
        {
            name: LocalTeacher(name, config, lock, device=device_kind(config.device or device))
            if config.local
            else StoredTeacher(name, config)
            if config.placement == "stored"
            else _client(name, config, cache, seed)
            for name, config in configs.items()
        }
    )


def _client(name: str, config: TeacherConfig, cache: ScoreStore | None, seed: int) -> ScoringClient:
    service = SERVICE_KINDS[config.kind]
    return TeacherClient(
        name,
        config.url,
        service=service.create(config.tokenizer, config.model, config.revision),
        api_key=_api_key(name, config),
        ca_file=config.ca_file,
        timeout_seconds=config.timeout_seconds,
        deadline_seconds=config.deadline_seconds,
        max_concurrency=config.max_concurrency,
        require_all_replicas=config.require_all_replicas,
        cache=cache,
        verify=config.verify,
        seed=seed,
    )


async def connect_teachers(
    pool: TeacherPool,
    configs: Mapping[str, TeacherConfig],
    student: StudentIdentity,
    cache: ProjectionCache,
    expected_manifests: Mapping[str, str],
    *,
    wait_seconds: float,
    losses: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Teacher]:
    """Make the handshake with every teacher, fetch its tokenizer, build its projection.

    Args:
        expected_manifests: teacher name -> manifest id in the checkpoint of this run.
        wait_seconds: deadline for all teachers to become ready.
        losses: teacher name -> loss that ``auto`` has selected before, by the checkpoint.

    Raises:
        MopdError: when a teacher is unavailable, lacks a feature, or has changed.
    """
    await pool.wait_until_ready(wait_seconds)
    manifests = await pool.handshake_all(
        {
            name: Expectation(
                top_k=config.top_k,
                temperature=config.scored_temperature,
                candidate_ids=config.support == "student_topk",
                messages=True,
                manifest_id=expected_manifests.get(name),
            )
            for name, config in configs.items()
        }
    )
    for name, config in configs.items():
        _require_model(name, config, manifests[name])
    tokenizers = await asyncio.gather(*[pool.client(name).tokenizer() for name in configs])
    teachers: dict[str, Teacher] = {}
    for (name, config), tokenizer in zip(configs.items(), tokenizers, strict=True):
        client = pool.client(name)
        teacher = teacher_of(
            name, config, manifests[name], tokenizer, student, cache, loss=losses.get(name)
        )
        if isinstance(client, StoredTeacher) and client.student != student.table.fingerprint:
            teacher = _without_lookaheads(teacher)
        teachers[name] = replace(teacher, path=client.path)
    return teachers


def _without_lookaheads(teacher: Teacher) -> Teacher:
    """Return a teacher whose stored scores have no lookaheads for this student."""
    if not teacher.lookaheads:
        return teacher
    logger.warning(
        "teacher %r: the stored scores have no lookaheads for this student, so that loss "
        "'prefix_kl' is computed without; mopd score --student stores them",
        teacher.name,
    )
    loss = teacher.config.loss.model_copy(update={"lookaheads": 0})
    return replace(teacher, config=teacher.config.model_copy(update={"loss": loss}))


def teacher_of(
    name: str,
    config: TeacherConfig,
    manifest: Manifest,
    tokenizer: TeacherTokenizer,
    student: StudentIdentity,
    cache: ProjectionCache,
    *,
    loss: str | None = None,
) -> Teacher:
    """Build a teacher with its projection to the student; its loss is not ``auto`` any more.

    Args:
        loss: type that ``auto`` has selected before.

    Raises:
        ConfigError: when the loss does not support the two vocabularies.
    """
    settings = resolve_loss(config.loss, student, tokenizer)
    if isinstance(config.loss, AutoConfig) and loss is not None:
        settings = config.loss.resolved(same_tokenizer=loss == "topk_kl")
    config = config.model_copy(update={"loss": settings})
    try:
        projection = find_projection(config.loss, student, tokenizer, cache)
    except ConfigError as error:
        raise ConfigError(
            f"teacher {name!r}: {error}", key=f"teachers.{name}.{error.key}"
        ) from error
    return Teacher(name, config, manifest, tokenizer, projection, student)


def _require_model(name: str, config: TeacherConfig, manifest: Manifest) -> None:
    """Compare the configured model of a service with the served one.

    Raises:
        TeacherMismatchError: if another model is served; ``key`` is the setting.
    """
    if config.placement == "stored" or not (config.service and config.service.describes_itself):
        return
    expected = {"model": config.model, "revision": config.revision}
    matches = {
        "model": config.model in (None, manifest.model)
        or folder_name(str(config.model)) == folder_name(manifest.model),
        "revision": manifest.revision.startswith(config.revision or ""),
    }
    for key, is_same in matches.items():
        if not is_same:
            raise TeacherMismatchError(
                f"teacher {name!r}: another {key} is served at {', '.join(config.url)} (found "
                f"{getattr(manifest, key)!r} of service {manifest.service!r}, expected "
                f"{expected[key]!r}). Correct the address or the setting.",
                key=f"teachers.{name}.{key}",
            )


def _api_key(name: str, config: TeacherConfig) -> str | None:
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise ConfigError(
            f"teachers.{name}.api_key_env: environment variable {config.api_key_env} is not set. "
            "Export the API key, or remove the setting.",
            key=f"teachers.{name}.api_key_env",
        )
    return key


def _listed(names: Sequence[str]) -> str:
    return " or ".join(names) or "no token"
