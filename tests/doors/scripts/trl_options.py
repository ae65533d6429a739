"""Names of the options of TRL's trainers that distil."""

from dataclasses import fields

from job import finish
from trl import DistillationConfig
from trl.experimental.async_distillation import AsyncDistillationConfig
from trl.experimental.gkd import GKDConfig
from trl.experimental.gold import GOLDConfig
from trl.experimental.server_distillation import ServerDistillationConfig

CONFIGS = (
    DistillationConfig,
    ServerDistillationConfig,
    AsyncDistillationConfig,
    GKDConfig,
    GOLDConfig,
)
finish(sorted({field.name for config in CONFIGS for field in fields(config)}))
