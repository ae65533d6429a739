"""Each teacher is the one that the run names."""

from collections.abc import Iterator, Mapping

from mopd_protocol.runtime.model_revision import folder_name
from mopd_trainer.diagnostics.finding import Finding
from mopd_trainer.teachers.connect import Teacher


def check_identity(teachers: Mapping[str, Teacher]) -> Iterator[Finding]:
    """Yield a finding per teacher: another teacher's name, or the model of another teacher."""
    for name, teacher in teachers.items():
        manifest = teacher.manifest
        same = [
            other
            for other, each in teachers.items()
            if other != name and each.manifest.manifest_id == manifest.manifest_id
        ]
        if manifest.service != name and manifest.service in teachers:
            yield Finding(
                "identity",
                "failed",
                f"teacher {name!r}: the service at {', '.join(teacher.config.url)} was started as "
                f"{manifest.service!r}, another teacher of this run.",
                "Swap the addresses.",
            )
        elif manifest.service not in (name, folder_name(manifest.model)):
            yield Finding(
                "identity",
                "warning",
                f"teacher {name!r}: the service at {', '.join(teacher.config.url)} was started as "
                f"{manifest.service!r}, with {manifest.model}.",
                f"Check the address, or set teachers.{name}.model to verify it in every run.",
            )
        elif same:
            yield Finding(
                "identity",
                "warning",
                f"teachers {name!r} and {same[0]!r} serve one model ({manifest.model}).",
                "Check their addresses.",
            )
        else:
            text = f"teacher {name!r} is {manifest.model}, manifest {manifest.manifest_id[:12]}."
            yield Finding("identity", "ok", text)
