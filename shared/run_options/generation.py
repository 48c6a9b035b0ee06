"""Run options for sampling and for vLLM's engine. docs/engine.md explains them.

The trainer recomputes the policy at ``temperature``. Every other restriction of sampling gives the generator another
distribution. The generator's logprobs are recorded, so importance sampling sees the difference.
"""

from typing import Any, Self, cast

from pydantic import Field, field_validator, model_validator

from shared.run_options.engine_args import why_not_in_a_run
from shared.run_options.section import Section

_CONSTRAINTS = ("regex", "json", "choice", "grammar", "json_object", "structural_tag")
_REFINEMENTS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_DEEPEST = 64
_MAX_ENGINE_ARGS = 150
_MAX_STOPS = 4096
_OWN = "it is a separate setting"

INSTEAD_IN_GENERATION_KWARGS = {
    "temperature": _OWN,
    "top_p": _OWN,
    "top_k": _OWN,
    "min_p": _OWN,
    "repetition_penalty": _OWN,
    "n": "the setting is num_generations",
    "max_tokens": "the setting is max_completion_length",
    "max_new_tokens": "the setting is max_completion_length",
    "seed": "completions are sampled without their own seed; otherwise a group would be copies of the same completion",
    "min_tokens": "it forbids the end of sequence, whose probability the trainer must learn from",
    "ignore_eos": "the trainer learns where completions end",
    "logprobs": "logprobs of the sampled tokens are always recorded",
    "prompt_logprobs": "only logprobs of the sampled tokens are recorded",
    "include_stop_str_in_output": "reward functions see the stop string, as it was sampled and is trained on",
    "detokenize": "reward functions see text",
    "skip_special_tokens": "reward functions see completions without special tokens",
    "logits_processors": "code is not taken from a run file",
    "num_beams": "completions are sampled",
    "do_sample": "completions are sampled",
    "suppress_tokens": "use bad_words",
    "stop_strings": "the setting is stop",
    "structured_outputs_regex": "the setting is vllm_structured_outputs_regex, outside generation_kwargs",
    "guided_decoding": "the setting is structured_outputs",
}
"""Arguments of SamplingParams and of transformers, to a clause that follows "there is no such setting; "."""


class GenerationKwargs(Section):
    """The arguments of TRL's ``generation_kwargs`` for vLLM's SamplingParams, as far as they can be trained on."""

    stop: str | list[str] | None = Field(
        default=None, description="Strings that end a completion; they stay at its end, in ids and in text"
    )
    stop_token_ids: list[int] | None = Field(
        default=None, max_length=_MAX_STOPS, description="Tokens that end a completion"
    )
    structured_outputs: dict[str, Any] | None = Field(
        default=None,
        description="regex, json (a schema), choice (a list), grammar (EBNF), json_object: true or structural_tag",
    )
    bad_words: list[str] | None = Field(default=None, max_length=_MAX_STOPS, description="Words that are never sampled")
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)

    @field_validator("stop")
    @classmethod
    def _stop_strings_have_characters(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop is not None and "" in ([stop] if isinstance(stop, str) else stop or [""]):
            raise ValueError("an empty stop string would end every completion before it begins; leave it out")
        return stop

    @field_validator("structured_outputs")
    @classmethod
    def _one_constraint(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is None:
            return None
        _check_depth(value)
        unknown = sorted(value.keys() - {*_CONSTRAINTS, *_REFINEMENTS})
        if unknown:
            raise ValueError(f"unknown constraint {', '.join(unknown)}; choose from {', '.join(_CONSTRAINTS)}")
        given = [name for name in _CONSTRAINTS if value.get(name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one constraint ({', '.join(_CONSTRAINTS)}), not {' and '.join(given) or 'none'}"
            )
        return value


class GenerationOptions(Section):
    """Options of sampling and of vLLM's engine, and the number of groups in flight on a replica."""

    # Generation
    num_generations: int = Field(default=8, ge=2, le=1024, description="Completions per prompt")
    max_completion_length: int = Field(default=512, ge=1, description="Most tokens in a completion")
    temperature: float = Field(default=1.0, ge=0.01, le=2, description="From 0.01 to 2, as vLLM samples no others")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0 turns it off")
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, gt=0)
    generation_kwargs: GenerationKwargs | None = Field(
        default=None, description="Further arguments of vLLM's SamplingParams: stop strings, structured outputs"
    )
    vllm_structured_outputs_regex: str | None = Field(
        default=None, description="Every completion matches this regular expression"
    )
    vllm: dict[str, Any] = Field(
        default={}, description="Engine arguments, by their names in vLLM's AsyncEngineArgs; vLLM checks them"
    )
    max_inflight_groups: int = Field(
        default=64,
        ge=1,
        description="Most groups one generator replica works on at a time; fewer if its KV cache is full",
    )

    @field_validator("vllm")
    @classmethod
    def _engine_arguments_are_the_runs_to_give(cls, args: dict[str, Any]) -> dict[str, Any]:
        if len(args) > _MAX_ENGINE_ARGS:
            raise ValueError(f"it names {len(args)} engine arguments, but a run may set at most {_MAX_ENGINE_ARGS}")
        _check_depth(args)
        reasons = [f"{name} cannot be set: {why}" for name in sorted(args) if (why := why_not_in_a_run(name, args))]
        if reasons:
            raise ValueError("; ".join(reasons))
        return args

    @model_validator(mode="after")
    def _one_structure(self) -> Self:
        kwargs = self.generation_kwargs
        if self.vllm_structured_outputs_regex is not None and kwargs is not None and kwargs.structured_outputs:
            raise ValueError(
                "vllm_structured_outputs_regex and generation_kwargs.structured_outputs are both set; keep one of them"
            )
        return self

    @model_validator(mode="after")
    def _the_engine_takes_the_longest_rollout(self) -> Self:
        longest = self.vllm.get("max_model_len")
        if isinstance(longest, int) and 0 < longest <= self.max_completion_length:
            raise ValueError(
                f"vllm.max_model_len={longest} leaves no room for a prompt beside max_completion_length="
                f"{self.max_completion_length}; raise it, or leave it out"
            )
        return self

    def structured_outputs(self) -> dict[str, Any] | None:
        """Return the arguments of vLLM's StructuredOutputsParams; None without a constraint."""
        if self.vllm_structured_outputs_regex is not None:
            return {"regex": self.vllm_structured_outputs_regex}
        kwargs = self.generation_kwargs
        return None if kwargs is None else kwargs.structured_outputs

    def asks_for_more_of_vllm(self) -> bool:
        """Return whether options are set that only vLLM can check: engine arguments, or some sampling options."""
        return bool(self.vllm or self.generation_kwargs or self.vllm_structured_outputs_regex is not None)

    def restrictions(self) -> list[str]:
        """Return the settings, except temperature, that make sampling differ from the policy's distribution."""
        kwargs = self.generation_kwargs or GenerationKwargs()
        is_set = {
            "top_p": self.top_p < 1,
            "top_k": self.top_k > 0,
            "min_p": self.min_p > 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "structured outputs": self.structured_outputs() is not None,
            "bad_words": bool(kwargs.bad_words),
            "presence_penalty": kwargs.presence_penalty != 0,
            "frequency_penalty": kwargs.frequency_penalty != 0,
        }
        return [name for name, is_it in is_set.items() if is_it]


def _check_depth(value: Any) -> None:
    """Raise ValueError if tables and lists are nested more than 64 levels deep, as no valid vLLM argument is."""
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                inner += cast("dict[str, Any]", node).values()
            elif isinstance(node, list):
                inner += node
        level = inner
    if level:
        raise ValueError(f"it nests deeper than {_DEEPEST} levels")
