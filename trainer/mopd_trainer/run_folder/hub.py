"""Upload of the trained student to the Hugging Face hub."""

from pathlib import Path

from mopd_protocol.errors import ConfigError, MopdError
from mopd_trainer.config.student import HubConfig

_KEY = "student.push_to_hub"


def require_hub(config: HubConfig | None) -> None:
    """Check before training that an upload is possible, without contacting the hub.

    Raises:
        ConfigError: when there is no token, or the hub library is offline.
    """
    if config is None:
        return
    from huggingface_hub import get_token
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        raise ConfigError(
            f"{_KEY}: HF_HUB_OFFLINE is set, so that nothing can be uploaded. Unset it, or remove "
            "the setting.",
            key=_KEY,
        )
    if get_token() is None:
        raise ConfigError(
            f"{_KEY}: no token for the hub (found neither HF_TOKEN nor that of 'hf auth login'). "
            "Set HF_TOKEN, or remove the setting.",
            key=_KEY,
        )


def push_to_hub(folder: Path, config: HubConfig | None) -> None:
    """Upload a model folder, in one commit; no-op without settings.

    Raises:
        MopdError: when that fails; the folder is unchanged.
    """
    if config is None:
        return
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(config.repo_id, private=config.private, exist_ok=True)
        if config.revision is not None:
            api.create_branch(config.repo_id, branch=config.revision, exist_ok=True)
        api.upload_folder(
            repo_id=config.repo_id,
            folder_path=folder,
            revision=config.revision,
            commit_message="Upload the trained student",
        )
    except Exception as error:  # of the library, its HTTP client and its upload processes
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        revision = "" if config.revision is None else f" --revision {config.revision}"
        raise MopdError(
            f"{_KEY}: the upload to {config.repo_id!r} failed: {reason}. Training is complete, and "
            f"the student is saved in {folder}. Upload it with: hf upload {config.repo_id} "
            f"{folder}{revision}",
            key=_KEY,
        ) from error
