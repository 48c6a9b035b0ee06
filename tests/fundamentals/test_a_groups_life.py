"""Chapter 2: a group's life, from a row of the data set to a batch of the trainer.

The trainer admits a group: it gives a row the next number and puts its prompt on the prompts stream. A generator adds
the completions, and a rewarder adds the rewards. Back at the trainer, a scored group waits until there are enough for
a batch. In the end, every group is either trained, or dropped and counted with a reason.

The code is in services/trainer/intake/. Generator and rewarder are one function each, in tests/trainer/bookkeeping.py.
"""

import pytest

from services.trainer.groups.ledger import Ledger
from services.trainer.intake.admission import Admission
from shared.messages import decode_completed_group, decode_prompt_group, decode_scored_group
from shared.redis.keys import RunKeys
from shared.redis.redis_connection import Redis
from shared.run_options.run_config import RunConfig
from tests.groups import scored_group
from tests.stream_view import entries
from tests.trainer.bookkeeping import FakeEncoder, FakeRows, Trainer, generate, score
from tests.trainer.intake.batch_rig import Rig

pytestmark = pytest.mark.unit


async def test_a_group_passes_three_streams_and_is_trained(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    assert await trainer.admission.admit(2) == [0, 1]
    (_, fields), _ = await entries(redis, run_keys.prompts)
    prompt = decode_prompt_group(fields["payload"])
    assert (prompt.group_id, prompt.prompt) == ("00000000", "abc")

    await generate(redis, run_keys)
    (_, fields), _ = await entries(redis, run_keys.completions)
    assert [rollout.completion for rollout in decode_completed_group(fields["payload"]).rollouts] == ["42", "42"]

    await score(redis, run_keys)
    (_, fields), _ = await entries(redis, run_keys.scored)
    rollouts = decode_scored_group(fields["payload"]).rollouts
    assert [outcome.value for rollout in rollouts for outcome in rollout.rewards] == [0.0, 1.0]

    assert await trainer.step() == [0, 1]
    assert (trainer.ledger.num_trained, trainer.ledger.num_in_flight) == (2, 0)
    assert [await redis.xlen(stream) for stream in (run_keys.prompts, run_keys.completions)] == [0, 0]


async def test_a_row_without_a_prompt_is_dropped_and_the_next_row_takes_its_place(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    ledger = Ledger()
    admission = Admission(
        redis,
        keys=run_keys,
        config=run_config,
        rows=FakeRows({1: "it has no prompt"}),
        encoder=FakeEncoder(),
        ledger=ledger,
        incarnation=1,
    )
    await admission.admit(2)
    assert ledger.admitted == 3
    assert ledger.dropped_by_reason() == {"bad_row": 1}
    assert [fields["group_id"] for _, fields in await entries(redis, run_keys.prompts)] == [b"00000000", b"00000002"]


async def test_an_invalid_entry_is_buried_and_the_other_groups_are_trained(
    redis: Redis, run_keys: RunKeys, run_config: RunConfig
) -> None:
    trainer = await Trainer.start(redis, run_keys, run_config)
    await redis.xadd(run_keys.scored, {"group_id": "00000009", "payload": b"\xc1 not msgpack"})
    await trainer.admission.admit(2)
    await generate(redis, run_keys)
    await score(redis, run_keys)

    assert await trainer.step() == [0, 1]
    ((_, letter),) = await entries(redis, run_keys.dead)
    assert letter["group_id"] == b"00000009"
    assert b"not a" in letter["reason"]


def test_a_batch_waits_for_its_last_group_and_says_how_many_have_arrived(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=2)
    rig.arrive(0, scored_group())
    batch = rig.batch()
    assert batch.groups == ()
    assert batch.waiting_for == "scored groups: 1 of the 2 for a batch have arrived"


def test_the_groups_with_the_oldest_tokens_are_taken_first(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=2)
    for number, version in ((0, 2), (1, 1), (2, 1)):
        rig.arrive(number, scored_group(f"{number:08d}", policy_version=version))
    assert rig.choose(policy_version=2) == [1, 2]


def test_a_group_that_became_too_stale_is_dropped_and_never_trained(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1, max_staleness=2)
    rig.arrive(0, scored_group(policy_version=3))
    rig.arrive(1, scored_group("00000001", policy_version=4))
    assert rig.choose(policy_version=6) == [1]
    assert rig.ledger.dropped_by_reason() == {"stale": 1}


def test_a_step_waits_for_a_group_that_would_be_too_stale_later_and_names_it(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1, max_staleness=1)
    rig.arrive(5, scored_group("00000005", policy_version=4))
    # Group 3 is still in work. It began at version 3, so after this step it would be two versions old.
    batch = rig.batch(policy_version=4, started={3: 3})
    assert batch.groups == ()
    assert "the oldest 00000003" in batch.waiting_for
    assert rig.choose(policy_version=4, started={3: 4}) == [5]


def test_a_group_with_equal_rewards_has_no_advantages_and_can_be_dropped(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1)
    rig.arrive(0, scored_group(rewards=(1.0, 1.0)))
    (group,) = rig.trained()
    assert (group.has_signal, group.advantages_G.tolist()) == (False, [0.0, 0.0])

    rig = Rig(run_config, groups_per_step=1, drop_zero_std_groups=True)
    rig.arrive(0, scored_group(rewards=(1.0, 1.0)))
    assert rig.ledger.dropped_by_reason() == {"zero_std": 1}


def test_taking_a_batch_settles_its_groups(run_config: RunConfig) -> None:
    rig = Rig(run_config, groups_per_step=1)
    rig.arrive(0, scored_group())
    rig.batches.take(rig.batch(), step=1)
    assert rig.ledger.num_trained == 1
    assert rig.scored.considered() == set()
