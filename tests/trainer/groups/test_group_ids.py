"""The ids of groups: an admission number, or the label of an evaluation."""

import pytest

from services.trainer.groups.group_ids import group_id, training_number

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("label", ["eval-0001-00000010-00000003", "", "-1", "1a", "\u0664\u0662"])
def test_no_other_label_passes_for_a_training_group(label: str) -> None:
    assert training_number(label) is None
    assert training_number(group_id(42)) == 42
