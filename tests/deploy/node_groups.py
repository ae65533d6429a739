"""Schema of a LeaderWorkerSet: the fields of its public reference, pods excepted.

No package has the schema of its CustomResourceDefinition. Pods are checked as pod templates.
"""

from typing import Any


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required,
        "properties": properties,
    }


_COUNT = {"type": "integer", "minimum": 0}
_SHARE = {"anyOf": [_COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
_POD = {"type": "object", "required": ["spec"]}

NODE_GROUPS = _object(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "leaderworkerset.x-k8s.io/v1"},
    kind={"const": "LeaderWorkerSet"},
    # The names of StatefulSets and their revisions end in up to 13 characters more.
    metadata={"type": "object", "properties": {"name": {"type": "string", "maxLength": 50}}},
    spec=_object(
        ["leaderWorkerTemplate"],
        replicas=_COUNT,
        leaderWorkerTemplate=_object(
            ["workerTemplate"],
            leaderTemplate=_POD,
            workerTemplate=_POD,
            size={"type": "integer", "minimum": 1},
            restartPolicy={
                "enum": ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
            },
        ),
        rolloutStrategy=_object(
            ["type"],
            type={"const": "RollingUpdate"},
            rollingUpdateConfiguration=_object(
                [], partition=_COUNT, maxUnavailable=_SHARE, maxSurge=_SHARE
            ),
        ),
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        networkConfig=_object([], subdomainPolicy={"enum": ["Shared", "UniquePerReplica"]}),
    ),
)
