"""The prompt that generators score after a push: the beginning of the data set, encoded for the model."""

from services.trainer.intake.admission import Encoder, PromptRows
from services.trainer.policy.training_core import TrainingCore
from services.trainer.push.prober import MAX_TOKENS, Prober, tolerance_of
from shared.errors import UserError
from shared.run_options.run_config import RunConfig

_MAX_ROWS = 64


def make_prober(config: RunConfig, core: TrainingCore, encoder: Encoder, rows: PromptRows) -> Prober | None:
    """Return the prober of a run; None if probing is off, or if no prompt has enough tokens."""
    is_quantised = config.load_in_4bit or config.vllm.get("quantization") is not None
    tolerance = tolerance_of(config.push_probe_tolerance, dtype=config.dtype, is_quantised=is_quantised)
    if tolerance is None:
        return None
    token_ids = _first_tokens(encoder, rows, longest=max(2, min(MAX_TOKENS, config.max_prompt_length or MAX_TOKENS)))
    if len(token_ids) < 2:  # the first token has no logprob
        return None
    return Prober(core.probe, token_ids=token_ids, tolerance=tolerance, is_alone=core.num_ranks == 1)


def _first_tokens(encoder: Encoder, rows: PromptRows, *, longest: int) -> list[int]:
    token_ids: list[int] = []
    for number in range(_MAX_ROWS):
        row = rows.row_at(number)
        if row.problem is not None:
            continue
        try:
            token_ids += encoder.encode(row.prompt)
        except UserError:
            continue
        if len(token_ids) >= longest:
            break
    return token_ids[:longest]
