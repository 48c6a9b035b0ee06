"""Policies with known weights, and transformers' logprobs under them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from services.trainer.push.prober import Prober
from tests.tiny_model import make_tiny_model

PROMPT_IDS = [1, 4, 9, 14, 30, 41, 7, 22]
LORA_RANK, LORA_ALPHA = 4, 12


def make_model_dir(path: Path, *, tied: bool) -> Path:
    """Write the model a generator starts with."""
    make_tiny_model(path)
    if tied:
        config = Qwen3Config.from_pretrained(path)
        config.tie_word_embeddings = True
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def make_policy(model_dir: Path, *, seed: int) -> Qwen3ForCausalLM:
    """Return a policy of that architecture. The weights of different seeds are unrelated, so that a mix-up shows."""
    torch.manual_seed(1000 + seed)
    return Qwen3ForCausalLM(Qwen3Config.from_pretrained(model_dir)).eval()


def make_adapter_policy(model_dir: Path, *, seed: int) -> Any:
    """Return the model of the directory in PEFT's wrapper. The adapters of different seeds are unrelated."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    policy: Any = get_peft_model(Qwen3ForCausalLM.from_pretrained(model_dir, dtype=torch.float32), config)
    torch.manual_seed(2000 + seed)
    for name, parameter in policy.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return policy.eval()


def adapters_of(policy: Any) -> dict[str, torch.Tensor]:
    """Return the adapters under their names in PEFT's files."""
    import peft

    found: dict[str, torch.Tensor] = cast(Any, peft).get_peft_model_state_dict(policy)
    return found


def weights_of(policy: Qwen3ForCausalLM) -> Callable[[], Iterable[tuple[str, torch.Tensor]]]:
    """Return the sender's input."""
    return lambda: policy.named_parameters()


def interrupted(
    policy: Qwen3ForCausalLM, *, at: int, by: Callable[[], None]
) -> Callable[[], Iterator[tuple[str, torch.Tensor]]]:
    """Return the same weights, but call ``by`` before parameter ``at`` is sent for the first time.

    The first pass over the weights only announces them. An attempt may fail before it comes that far.
    """
    num_passes = 0
    is_called = False

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_passes, is_called
        num_passes += 1
        for index, named in enumerate(policy.named_parameters()):
            if num_passes > 1 and index == at and not is_called:
                is_called = True
                by()
            yield named

    return weights


def prober_of(policy: Qwen3ForCausalLM, *, tolerance: float = 0.05) -> Prober:
    """Return the prober for that policy, with a tolerance in nats."""

    def logprobs(token_ids: Sequence[int]) -> list[float]:
        return logprobs_of(policy, list(token_ids[:1]), list(token_ids[1:]))

    return Prober(logprobs, token_ids=[*PROMPT_IDS, *PROMPT_IDS[::-1]], tolerance=tolerance)


def logprobs_of(policy: Any, prompt_ids: list[int], completion_ids: list[int]) -> list[float]:
    """Return log p of each completion token given everything before it."""
    ids = torch.tensor([prompt_ids + completion_ids])
    with torch.no_grad():
        logits: torch.Tensor = policy(ids).logits
    logprobs_TV = torch.log_softmax(logits[0, len(prompt_ids) - 1 : -1].double(), dim=-1)
    return [float(logprobs_TV[position, token]) for position, token in enumerate(completion_ids)]
