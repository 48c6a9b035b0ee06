"""Before a rewarder judges anybody's answers, it judges two whose rewards are known."""

from services.rewarder.reward_call import RewardCall
from services.rewarder.rewarder_metrics import SELF_TEST_LANE
from services.rewarder.scoring import Scorer, WeightedFunction
from shared.errors import UnavailableError, UserError

_TIMEOUT_S = 60.0


async def self_test(scorer: Scorer) -> None:
    """Have one right and one wrong answer verified.

    Raises:
        UserError: They were judged wrongly.
        UnavailableError: There was no answer.
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
