"""Translates TRL's ``generation_kwargs``, and replaces values that the losses cispo and vespo cannot use.

Each function takes its options out of the translation, and adds the run's settings, notes and problems.
"""

from typing import Any, Final, cast

from shared.run_options.trl.translation import Translation

_SETTINGS: Final = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    **dict.fromkeys(("max_tokens", "max_new_tokens"), "max_completion_length"),
    "structured_outputs_regex": "vllm_structured_outputs_regex",
}
"""Arguments of ``generation_kwargs`` that are settings of a run. They win over the options, here also in the loss."""
_OF_TRANSFORMERS: Final = (
    *("do_sample", "num_beams", "num_beam_groups", "length_penalty", "early_stopping", "diversity_penalty"),
    *("use_cache", "cache_implementation", "pad_token_id", "bos_token_id"),
)
"""Arguments of transformers' ``generate`` without a meaning for vLLM, which samples each completion by itself."""
_CISPO_BOUND: Final = 5.0
"""ScaleRL, arXiv 2510.13786, section 3.2."""


def sampling(translation: Translation) -> None:
    """Translate ``generation_kwargs``: arguments of vLLM stay, others are settings of a run or have no effect."""
    given: Any = translation.left.get("generation_kwargs")
    if not isinstance(given, dict):
        return
    kwargs = {name: value for name, value in cast("dict[str, Any]", given).items() if value is not None}
    moved = [name for name in kwargs if name in _SETTINGS]
    for name in moved:
        translation.left[_SETTINGS[name]] = kwargs.pop(name)
    if "stop_strings" in kwargs:
        kwargs["stop"] = kwargs.pop("stop_strings")
    if kwargs.get("do_sample") is False:
        translation.problems.append(
            ("generation_kwargs.do_sample", "is false, and completions of a group would all be the same; leave it out")
        )
    left_out = [name for name in _OF_TRANSFORMERS if kwargs.pop(name, None) is not None]
    if moved:
        settings = dict.fromkeys(_SETTINGS[name] for name in moved)
        of_loss = [name for name in settings if name in ("temperature", "max_completion_length")]
        also = (
            f"; the loss takes {' and '.join(of_loss)} from there too, where TRL keeps its options" if of_loss else ""
        )
        translation.notes.append(f"generation_kwargs: {', '.join(moved)} became the run's {', '.join(settings)}{also}")
    if left_out:
        translation.notes.append(
            f"generation_kwargs: {', '.join(left_out)} left out; vLLM samples each completion by itself, without beams"
        )
    del translation.left["generation_kwargs"]
    if kwargs:
        translation.left["generation_kwargs"] = kwargs


def loss(translation: Translation) -> None:
    """Replace values that a loss cannot use: ``epsilon_high`` of cispo, and the correction mode of vespo."""
    loss_type = translation.value("loss_type")
    bound = translation.value("epsilon_high")
    if loss_type == "cispo" and (bound is None or (isinstance(bound, int | float) and bound < 1)):
        cut = translation.value("epsilon") if bound is None else bound
        translation.left["epsilon_high"] = _CISPO_BOUND
        translation.notes.append(
            f"epsilon_high: {_CISPO_BOUND:g}, as in ScaleRL; TRL would cut the weight of every token at {cut}, because "
            "cispo takes it for the bound of the ratio itself"
        )
    mode = translation.value("vllm_importance_sampling_mode")
    corrects = translation.value("vllm_importance_sampling_correction")
    if loss_type == "vespo" and corrects and str(mode).startswith("sequence"):
        translation.left["vllm_importance_sampling_mode"] = "token_truncate"
        translation.notes.append(
            f"vllm_importance_sampling_mode: token_truncate, because vespo multiplies the weights itself; TRL refuses "
            f"{mode} with vLLM"
        )
