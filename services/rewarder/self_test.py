"""Scores two answers with known rewards, before the rewarder scores any run."""

from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import SELF_TEST_LANE
from services.rewarder.scoring import Scorer, WeightedFunction
from shared.errors import UnavailableError, UserError

_TIMEOUT_S = 60.0


async def self_test(scorer: Scorer) -> None:
    """Score one right and one wrong answer with ``accuracy_reward``.

    Raises:
        UserError: The rewards are wrong.
        UnavailableError: The answers were not scored.
    """
    call = RewardCall(
        prompts=["1/2?"] * 2, completions=[r"\boxed{\frac{1}{2}}", r"\boxed{2}"], columns={"solution": ["0.5"] * 2}
    )
    rows = await scorer.score(call, [WeightedFunction("accuracy_reward")], timeout_s=_TIMEOUT_S, lane=SELF_TEST_LANE)
    values = [row[0].value for row in rows]
    if values == [1.0, 0.0]:
        return
    if rows[0][0].outcome == "scored":
        raise UserError(f"math-verify judged 1/2 = 0.5 and 2 = 0.5 as {values}: install the pinned math-verify")
    raise UnavailableError(f"the self-test was not answered: {rows[0][0].outcome}: {rows[0][0].detail}")
