import pytest

from services.trainer.schedule import total_steps
from shared.errors import UserError
from shared.run_config import RunConfig


def config(**settings: object) -> RunConfig:
    return RunConfig.model_validate(
        {"model": "m", "dataset_name": "d.jsonl", "reward_funcs": ["accuracy_reward"], "groups_per_step": 4} | settings
    )


def test_max_steps_decides_whatever_the_dataset() -> None:
    assert total_steps(config(max_steps=7), num_rows=1000) == 7


@pytest.mark.parametrize(
    ("epochs", "num_rows", "steps"), [(1.0, 8, 2), (1.0, 9, 3), (2.5, 8, 5), (0.1, 8, 1), (1.0, 1, 1)]
)
def test_epochs_become_steps_and_the_last_one_is_filled(epochs: float, num_rows: int, steps: int) -> None:
    assert total_steps(config(num_train_epochs=epochs), num_rows=num_rows) == steps


def test_a_warm_up_longer_than_the_run_is_refused_with_the_numbers() -> None:
    with pytest.raises(UserError, match=r"warmup_steps=3 .* 8 rows are 2 steps") as caught:
        total_steps(config(warmup_steps=3), num_rows=8)
    assert caught.value.field == "warmup_steps"


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UserError, match="no rows"):
        total_steps(config(), num_rows=0)
