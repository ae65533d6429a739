"""The order of prompts is a function of the seed and the step."""

from hypothesis import given
from hypothesis import strategies as st

from mopd_protocol.samples import Prompt
from mopd_trainer.data.prompts import PromptOrder
from tests.trainer.students import MESSAGES

PROMPTS = [Prompt(index=index, messages=MESSAGES, teachers={"math": 1.0}) for index in range(10)]


def taken(count: int, per_step: int, steps: range, *, seed: int = 0, shuffle: bool = True):
    order = PromptOrder(PROMPTS[:count], prompts_per_step=per_step, seed=seed, shuffle=shuffle)
    return [prompt.index for step in steps for prompt in order.batch(step)]


@given(count=st.integers(1, 10), per_step=st.integers(1, 25), seed=st.integers(0, 3))
def test_every_epoch_takes_every_prompt_once(count: int, per_step: int, seed: int) -> None:
    indices = taken(count, per_step, range(3 * count), seed=seed)
    assert len(indices) == 3 * count * per_step
    for start in range(0, len(indices) - count + 1, count):
        assert sorted(indices[start : start + count]) == list(range(count))


@given(per_step=st.integers(1, 25), first=st.integers(0, 20))
def test_a_step_takes_the_same_prompts_after_a_resume(per_step: int, first: int) -> None:
    whole = taken(7, per_step, range(first + 2))
    assert taken(7, per_step, range(first, first + 2)) == whole[first * per_step :]


def test_epochs_and_seeds_have_different_orders() -> None:
    epochs = [tuple(taken(10, 10, range(epoch, epoch + 1))) for epoch in range(5)]
    seeds = [tuple(taken(10, 10, range(1), seed=seed)) for seed in range(5)]
    assert len({*epochs, *seeds}) == 9  # epoch 0 of seed 0 stands in both


def test_data_may_keep_its_order() -> None:
    assert taken(4, 3, range(3), shuffle=False) == [0, 1, 2, 3, 0, 1, 2, 3, 0]
