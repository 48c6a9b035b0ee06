import pytest

from services.trainer.groups.schedule import BatchShape, total_steps
from shared.errors import UserError
from shared.run_options.run_config import RunConfig

pytestmark = pytest.mark.unit


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
        total_steps(config(warmup_steps=3, num_train_epochs=1.0), num_rows=8)
    assert caught.value.field == "warmup_steps"


def test_stages_longer_than_the_run_are_refused_with_the_numbers() -> None:
    stages = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}}
    with pytest.raises(UserError, match=r"warmup_steps=1 \+ num_decay_steps=2 is more than .* 8 rows are 2") as caught:
        total_steps(config(warmup_steps=0.5, num_train_epochs=1.0, **stages), num_rows=8)
    assert caught.value.field == "lr_scheduler_kwargs"


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(UserError, match="no rows"):
        total_steps(config(), num_rows=0)


def test_epochs_are_whole_batches_and_every_pass_over_a_batch_counts_its_steps() -> None:
    """Twenty rows are three batches of 2 minibatches of 4 groups, each trained in 2 passes of 2 steps."""
    settings = config(num_train_epochs=1.0, steps_per_generation=2, num_iterations=2, max_staleness=3)
    assert total_steps(settings, num_rows=20) == 12


@pytest.mark.parametrize(("num_steps", "groups"), [(0, 0), (1, 4), (2, 8), (3, 8), (4, 8), (5, 12), (8, 16), (9, 20)])
def test_the_groups_of_steps_are_the_groups_of_their_minibatches(num_steps: int, groups: int) -> None:
    """Batches of minibatches a, b: a b a b | c d c d. Step 5 needs the first groups of the second batch."""
    assert BatchShape(4, steps_per_generation=2, num_iterations=2).groups(num_steps=num_steps) == groups


def test_a_batch_that_the_run_ends_within_is_cut_into_fewer_minibatches() -> None:
    shape = BatchShape(4, steps_per_generation=4)
    assert [shape.minibatches(num_steps_left=left) for left in (1, 3, 4, 9)] == [1, 3, 4, 4]
