"""Types, wire format and token bytes shared by teacher services and students."""

from typing import TYPE_CHECKING

from mopd_protocol.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mopd_protocol.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DiskError,
        InvalidResponseError,
        MissingPackageError,
        MopdError,
        RankError,
        ResumeError,
        TeacherError,
        TeacherMismatchError,
        TeacherUnavailableError,
        TokenizerError,
        TrainingError,
        WireFormatError,
    )
    from mopd_protocol.manifest import Manifest
    from mopd_protocol.requests import LogprobsRequest
    from mopd_protocol.responses import LogprobsResponse
    from mopd_protocol.samples import Message, Prompt, Rollout, TeacherScore
    from mopd_protocol.tokenizers.token_sequence import TokenSequence
    from mopd_protocol.topk_logprobs import TopKLogprobs
else:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "CheckpointError": "errors",
            "ConfigError": "errors",
            "DataError": "errors",
            "DiskError": "errors",
            "InvalidResponseError": "errors",
            "LogprobsRequest": "requests",
            "LogprobsResponse": "responses",
            "Manifest": "manifest",
            "Message": "samples",
            "MissingPackageError": "errors",
            "MopdError": "errors",
            "Prompt": "samples",
            "RankError": "errors",
            "ResumeError": "errors",
            "Rollout": "samples",
            "TeacherError": "errors",
            "TeacherMismatchError": "errors",
            "TeacherScore": "samples",
            "TeacherUnavailableError": "errors",
            "TokenSequence": "tokenizers.token_sequence",
            "TokenizerError": "errors",
            "TopKLogprobs": "topk_logprobs",
            "TrainingError": "errors",
            "WireFormatError": "errors",
        },
    )

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DiskError",
    "InvalidResponseError",
    "LogprobsRequest",
    "LogprobsResponse",
    "Manifest",
    "Message",
    "MissingPackageError",
    "MopdError",
    "Prompt",
    "RankError",
    "ResumeError",
    "Rollout",
    "TeacherError",
    "TeacherMismatchError",
    "TeacherScore",
    "TeacherUnavailableError",
    "TokenSequence",
    "TokenizerError",
    "TopKLogprobs",
    "TrainingError",
    "WireFormatError",
]
