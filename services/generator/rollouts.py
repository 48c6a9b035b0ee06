"""Converts the sampled completions of a prompt group to rollouts, to publish them. Pure: knows nothing of engines.

prompt ids          p p p p
completion ids              c c c c c     end-of-sequence included
token_ids           p p p p c c c c c
loss_mask           0 0 0 0 1 1 1 1 1
logprobs                    l l l l l     over sampled tokens
version_spans               3 3|4 4 4     policy versions 3 and 4: weights changed mid-completion
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shared.arrays import Ids, pack_ids, pack_logprobs, pack_mask, unpack_ids
from shared.errors import MessageError
from shared.lineage import LineageVersion
from shared.messages import CompletedGroup, PromptGroup, Rollout, Row, Stamp, Turn, VersionSpan


@dataclass(frozen=True)
class SampledCompletion:
    """One sampled sequence, as the engine returned it.

    ``spans`` are (version label, start, end) over ``token_ids``; the label ``2:40`` means version 40 of incarnation 2.
    A logprob is NaN if the engine did not provide it.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    spans: Sequence[tuple[str, int, int]]
    finish_reason: str


def completed_group(
    prompt: PromptGroup,
    completions: Sequence[SampledCompletion],
    *,
    claimed_at_s: float,
    generated_at_s: float,
    by: str,
) -> CompletedGroup:
    """Return a prompt group with one rollout for each completion, ready to be published.

    Args:
        prompt: The group as it was claimed.
        completions: Its ``num_generations`` completions.
        claimed_at_s: Time of the claim, in Unix seconds.
        generated_at_s: Time of the last completion, in Unix seconds.
        by: Name of this replica.

    Raises:
        MessageError: A completion is missing, or must not be trained on.
    """
    if len(completions) != prompt.num_generations:
        raise MessageError(f"the engine returned {len(completions)} completions instead of {prompt.num_generations}")
    prompt_ids = unpack_ids(prompt.prompt_ids)
    return CompletedGroup(
        prompt=prompt,
        rollouts=tuple(
            _rollout(prompt.group_id, branch, prompt_ids, completion, claimed_at_s, generated_at_s)
            for branch, completion in enumerate(completions)
        ),
        stamps=(Stamp("claimed", claimed_at_s, by), Stamp("generated", generated_at_s, by)),
    )


def _rollout(
    group_id: str, branch: int, prompt_ids: Ids, completion: SampledCompletion, started_at_s: float, ended_at_s: float
) -> Rollout:
    rollout_id = f"{group_id}-{branch}"
    num_prompt, num_sampled = len(prompt_ids), len(completion.token_ids)
    spans = version_spans(f"rollout {rollout_id}", completion)
    row = Row(
        token_ids=pack_ids([*prompt_ids.tolist(), *completion.token_ids]),
        loss_mask=pack_mask([0] * num_prompt + [1] * num_sampled),
        logprobs=pack_logprobs(completion.logprobs),
        version_spans=spans,
        turns=(
            Turn("assistant", num_prompt, num_prompt + num_sampled, completion.finish_reason, started_at_s, ended_at_s),
        ),
    )
    return Rollout(rollout_id, group_id, branch, (row,), completion.text)


def version_spans(name: str, completion: SampledCompletion) -> tuple[VersionSpan, ...]:
    """Check that a completion may be trained on, and return its version spans with the labels parsed.

    Raises:
        MessageError: It has no token, not one logprob per token, an infinite logprob or only NaN, or a token without a
            version. The message begins with ``name``, such as "rollout 00000000-1".
    """
    num_sampled = len(completion.token_ids)
    if num_sampled == 0:
        raise MessageError(f"{name} has no sampled token")
    if len(completion.logprobs) != num_sampled:
        raise MessageError(f"{name} has {len(completion.logprobs)} logprobs for {num_sampled} tokens")
    if any(map(math.isinf, completion.logprobs)) or all(map(math.isnan, completion.logprobs)):
        raise MessageError(f"{name} has an infinite logprob, or only NaN logprobs: the weights have diverged")
    spans: list[VersionSpan] = []
    end = 0
    for label, start, stop in completion.spans:
        try:
            version = LineageVersion.parse(label)
        except ValueError:
            version = None
        if start != end or stop <= start or version is None:
            raise MessageError(f"{name} was sampled under weights without a version: {completion.spans}")
        spans.append(VersionSpan(version.policy_version, start, stop, version.incarnation))
        end = stop
    if end != num_sampled:
        raise MessageError(f"{name} has versions for {end} of its {num_sampled} tokens")
    return tuple(spans)
