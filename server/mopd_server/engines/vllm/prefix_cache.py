"""Limit of vLLM's prefix cache: completions are never read from the cache.

Positions of a cached prefix are not computed, so that completion tokens among them have no
distribution. The hashes of blocks that contain such positions are replaced by random ones.
"""

# vLLM need not be installed where this is checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false

import secrets
from typing import Any

from mopd_server.engines.vllm.completion_rows import ARGUMENT, RowRequest
from mopd_server.engines.vllm.processes.idle_waiting import wait_without_spinning


def create_scheduler(**options: Any) -> Any:
    """Return vLLM's scheduler for these options, with the limit (``scheduler_cls``).

    Called in the engine's process, which waits for its workers afterwards.
    """
    from vllm.platforms import current_platform
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    is_async = options["vllm_config"].scheduler_config.async_scheduling
    scheduler = (AsyncScheduler if is_async else Scheduler)(**options)
    if current_platform.is_cpu():
        wait_without_spinning()
    add_request = scheduler.add_request

    def add_limited_request(request: Any) -> None:
        limit_hits(request, scheduler.hash_block_size)
        add_request(request)

    scheduler.add_request = add_limited_request
    return scheduler


def limit_hits(request: Any, block_tokens: int) -> None:
    """Replace the hashes of all blocks with positions that predict completion tokens."""
    arguments = getattr(request.sampling_params, "extra_args", None) or {}
    if ARGUMENT in arguments:
        shared = RowRequest.decode(arguments).start // block_tokens
        hashes = request.block_hashes
        hashes[shared:] = [type(each)(secrets.token_bytes(len(each))) for each in hashes[shared:]]
