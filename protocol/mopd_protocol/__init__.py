"""Types, wire format and token bytes shared by teacher services and students."""

from typing import TYPE_CHECKING

from mopd_protocol.runtime.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from mopd_protocol.codec import decode_json
    from mopd_protocol.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        DegradationError,
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
        VerificationError,
        WeightsError,
        WireFormatError,
    )
    from mopd_protocol.manifest import Manifest
    from mopd_protocol.requests import LogprobsDtype, LogprobsRequest, SequenceRequest
    from mopd_protocol.responses import LogprobsResponse
    from mopd_protocol.runtime.atomic_file import replacing, replacing_folder
    from mopd_protocol.samples import Message, Prompt, Rollout, TeacherScore
    from mopd_protocol.tokenizers.token_sequence import TokenSequence
    from mopd_protocol.tokenizers.token_table import (
        TextEncoder,
        TokenRoles,
        TokenTable,
        control_tokens,
    )
    from mopd_protocol.tokenizers.tokenizer_file import tokenizer_json
    from mopd_protocol.tokenizers.tokenizer_roles import ChatTokenizer, roles_of
    from mopd_protocol.topk_logprobs import TopKLogprobs
else:
    __getattr__, __dir__ = lazy_exports(__name__)

__all__ = [
    "ChatTokenizer",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "DegradationError",
    "DiskError",
    "InvalidResponseError",
    "LogprobsDtype",
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
    "SequenceRequest",
    "TeacherError",
    "TeacherMismatchError",
    "TeacherScore",
    "TeacherUnavailableError",
    "TextEncoder",
    "TokenRoles",
    "TokenSequence",
    "TokenTable",
    "TokenizerError",
    "TopKLogprobs",
    "TrainingError",
    "VerificationError",
    "WeightsError",
    "WireFormatError",
    "control_tokens",
    "decode_json",
    "replacing",
    "replacing_folder",
    "roles_of",
    "tokenizer_json",
]
