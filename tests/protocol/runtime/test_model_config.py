"""Values of configurations with nulls, other names and nested language models."""

from typing import Any

import pytest
from transformers import AutoConfig, Gemma3Config, Gemma3TextConfig

from mopd_protocol.errors import ConfigError, WeightsError
from mopd_protocol.runtime import model_config


def config_of(family: str, **values: Any) -> Any:
    config = AutoConfig.for_model(family)
    vars(config).update(values)  # without the validation of some releases
    return config


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (config_of("qwen2"), 1.0),
        (config_of("qwen2", logit_scale=None, logits_scaling=None), 1.0),
        (config_of("cohere", logit_scale=0.5), 0.5),
        (config_of("granite", logits_scaling=4.0, logit_scale=None), 0.25),
        (config_of("granite", logits_scaling=0.0), 1.0),
        (config_of("mpt"), 1.0),  # null by default
        (config_of("mpt", logit_scale="inv_sqrt_d_model"), 1.0),
    ],
)
def test_the_scale_of_logits(config: Any, scale: float) -> None:
    assert model_config.logit_scale(config) == scale


def test_the_soft_cap() -> None:
    caps = [config_of("gemma2"), config_of("gemma2", final_logit_softcapping=None)]
    assert [model_config.logit_soft_cap(each) for each in [*caps, config_of("llama")]] == [
        30.0,
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (config_of("llama", max_position_embeddings=512), 512),
        (config_of("llama", max_position_embeddings=None), None),
        (config_of("gpt2", n_positions=1024), 1024),
        (config_of("gptj", n_positions=2048), 2048),
        (config_of("mpt", max_seq_len=2048), 2048),
        (Gemma3Config(text_config=Gemma3TextConfig(max_position_embeddings=64)), 64),
    ],
)
def test_the_longest_sequence(config: Any, longest: int | None) -> None:
    assert model_config.max_positions(config) == longest


def test_a_nested_language_model() -> None:
    text = Gemma3TextConfig(vocab_size=77, dtype="bfloat16")
    config = Gemma3Config(text_config=text, dtype=None)
    assert model_config.vocabulary_size(config) == 77
    assert str(model_config.stored_dtype(config)).removeprefix("torch.") == "bfloat16"
    assert model_config.vocabulary_size(object()) is None
    assert model_config.stored_dtype(object()) is None


@pytest.mark.parametrize("value", [True, False, None])
def test_ties_and_quantization_may_be_null(value: bool | None) -> None:
    config = config_of("qwen2", tie_word_embeddings=value, quantization_config=value and {"a": 1})
    assert model_config.ties_head(config) == bool(value)
    assert model_config.is_quantized(config) == bool(value)
    assert model_config.is_quantized({"quantization_config": value}) == bool(value)


def test_errors_name_the_null_value() -> None:
    config = config_of("cohere", logit_scale=None, eos_token_id=None)
    with (
        pytest.raises(ConfigError, match="logit_scale") as caught,
        model_config.explaining_config("model", "model", config),
    ):
        config.logit_scale * 1.0
    assert "eos_token_id" not in str(caught.value)
    # Without a null value, and of mopd: unchanged.
    with pytest.raises(TypeError), model_config.explaining_config("m", "m", config_of("cohere")):
        config.logit_scale * 1.0
    with pytest.raises(WeightsError), model_config.explaining_config("model", "model", config):
        raise WeightsError("incomplete", key="a")
    # No configuration could be loaded: any error is one of the configuration.
    with pytest.raises(ConfigError) as caught, model_config.explaining_config("model", "model"):
        config_of("qwen2").__class__(tie_word_embeddings=None)
    assert "tie_word_embeddings" in str(caught.value)
