"""Settings -> a ``TeacherService`` with its model in memory."""

from mopd_server.service import TeacherService
from mopd_server.settings import TeacherSettings
from mopd_server.tokenization import TeacherTokenizer
from mopd_server.tokenizer_loading import load_tokenizer
from mopd_server.transformers_engine import load_transformers_engine


def load_service(settings: TeacherSettings) -> TeacherService:
    """The teacher that ``settings`` describe, not yet warmed up.

    The tokenizer is loaded and checked first: it takes a moment, the model may take minutes.

    Raises:
        MopdError: one sentence about what is wrong with the model, its tokenizer or a setting.
    """
    tokenizer = TeacherTokenizer(load_tokenizer(settings))
    engine = load_transformers_engine(settings, tokenizer.table)
    return TeacherService(tokenizer, engine, settings)
