"""What rank 0 sends to the other ranks arrives as it was."""

from dataclasses import fields, replace

import numpy as np
import pytest

from services.trainer.policy.microbatches import TrainRow
from services.trainer.ranks.rank_commands import Accumulate, PackedRow, decode_command, encode

pytestmark = pytest.mark.unit


def test_a_row_arrives_with_all_of_its_fields() -> None:
    row = TrainRow(
        token_ids=np.array([5, 6, 7], dtype=np.int32),
        loss_mask=np.array([0, 1, 1], dtype=np.uint8),
        generator_logprobs=np.array([-0.5, np.nan], dtype=np.float32),
        advantage=np.array([0.5, -0.25], dtype=np.float32),
        share=1 / 3,
        old_logprobs=np.array([-0.5, -1.0], dtype=np.float32),
        reference_logprobs=np.array([-0.75, -2.0], dtype=np.float32),
    )
    for sent in (row, replace(row, advantage=0.5, old_logprobs=None, reference_logprobs=None)):
        command = decode_command(encode(Accumulate([PackedRow.of(sent)], [], None, [])))
        assert isinstance(command, Accumulate)
        arrived = command.rows[0].unpacked()
        for field in fields(TrainRow):
            np.testing.assert_array_equal(getattr(arrived, field.name), getattr(sent, field.name), err_msg=field.name)
