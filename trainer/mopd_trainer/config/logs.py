"""``LoggingConfig``: logs, trackers and recordings of a run."""

from pydantic import Field

from mopd_trainer.config.settings import Settings


class LoggingConfig(Settings):
    """Output besides the journal (``journal.jsonl``), which is always written."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    wandb: bool = False
    """Log metrics and the table ``completions`` to Weights & Biases, which reads its variables
    (``WANDB_MODE``)."""
    trackio: bool = False
    """Log metrics and the table ``completions`` to trackio."""
    project: str = "mopd"
    """Project of Weights & Biases and trackio; the name of the run is ``exp_name``."""
    record: bool = False
    """Save the completions and scores of every step in ``recordings``, for a ``replay``: about
    24 + 8 ``top_k`` bytes per token and teacher."""
    completions: int = Field(default=2, ge=0)
    """Completions of each source that are saved in ``completions.jsonl`` in the first and in each
    logged step: the text, both tokenizations, and the loss of the first 512 tokens by teacher,
    which the report shows in colour."""
    top_k: int = Field(default=5, ge=0, le=50)
    """Most likely tokens of the student and of each teacher that are saved for the first 128 tokens
    of such a completion: about 15 bytes each; 0: none."""
