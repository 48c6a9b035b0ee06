"""The parts of a model's config.json that determine memory: the number of weights, and the KV cache of a token.

    parameters   counted layer by layer as transformers builds them, for the architectures in FAMILIES
    KV cache     for each token, 2 x layers x key-value heads x head size numbers (keys and values)

For other architectures the weights are counted in the headers of their files (model_source.py), or given.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from shared.errors import UserError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
_QKV_BIAS = frozenset({"qwen2"})
_QK_NORM = frozenset({"qwen3", "qwen3_moe"})


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal language model, from its config.json.

    Attributes:
        num_parameters: The number of weights; None if the config does not determine it.
        num_linear_inputs_and_outputs: Sum of in + out over the linear layers that get adapters. Times r, this is the
            number of LoRA parameters (arXiv 2106.09685, section 4.1). None if unknown.
        num_embedding_parameters: Weights of the embeddings and the last projection, counted once if they are tied.
        vocab_size: Tokens in the vocabulary. The embeddings are the largest parameter: this times ``hidden_size``.
        num_layer_parameters: Weights of the largest layer; None if unknown.
    """

    model_type: str
    num_parameters: int | None
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_embedding_parameters: int
    num_attention_layers: int
    vocab_size: int
    num_layer_parameters: int | None = None
    num_linear_inputs_and_outputs: int | None = None
    max_position_embeddings: int | None = None

    def splits_over(self, tensor_parallel: int) -> bool:
        """Whether vLLM can split layers over this many GPUs: heads divide evenly, key-value heads divide or repeat."""
        whole, copied = self.num_kv_heads % tensor_parallel, tensor_parallel % self.num_kv_heads
        return self.num_heads % tensor_parallel == 0 and 0 in (whole, copied)

    def kv_numbers_per_token(self, *, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> int:
        """Return how many numbers the fullest GPU's KV cache holds for one token, in its layers and for its heads."""
        heads, layers = -(-self.num_kv_heads // tensor_parallel), -(-self.num_attention_layers // pipeline_parallel)
        return 2 * layers * heads * self.head_dim


def model_shape(config: Mapping[str, Any], *, where: str) -> ModelShape:
    """Compute the sizes of a model from the content of its config.json. ``where`` names the file in messages.

    Raises:
        UserError: The config does not describe a transformer with an ordinary KV cache.
    """
    inner: Any = config.get("text_config")
    text = cast("Mapping[str, Any]", inner if isinstance(inner, dict) else config)
    kind = str(config.get("model_type", ""))
    if "kv_lora_rank" in text:
        raise UserError(f"{where}: the KV cache of {kind} is compressed, and `headrace plan` does not know its size")
    heads, hidden = _whole(text, "num_attention_heads", where), _whole(text, "hidden_size", where)
    layers, vocabulary = _whole(text, "num_hidden_layers", where), _whole(text, "vocab_size", where)
    head_dim = int(text.get("head_dim") or hidden // heads)
    kv_heads = int(text.get("num_key_value_heads") or heads)
    is_tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    kinds: Any = text.get("layer_types") or ["full_attention"] * layers
    longest: Any = text.get("max_position_embeddings")
    counted = _count(kind, text, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=layers)
    embeddings = vocabulary * hidden * (1 if is_tied else 2)
    return ModelShape(
        model_type=kind,
        num_parameters=None if counted is None else sum(counted.layers) + embeddings + hidden,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_embedding_parameters=embeddings,
        # Linear attention keeps no KV cache and is not counted. A sliding window needs less, but counts in full.
        num_attention_layers=sum("attention" in str(one) and "linear" not in str(one) for one in kinds),
        vocab_size=vocabulary,
        num_layer_parameters=None if counted is None else max(counted.layers),
        num_linear_inputs_and_outputs=None if counted is None else counted.linear,
        max_position_embeddings=longest if isinstance(longest, int) else None,
    )


@dataclass(frozen=True)
class _Counted:
    layers: list[int]
    linear: int | None


def _count(
    kind: str, text: Mapping[str, Any], *, hidden: int, heads: int, kv_heads: int, head_dim: int, layers: int
) -> _Counted | None:
    if kind not in FAMILIES:
        return None
    queries, keys = heads * head_dim, kv_heads * head_dim
    attention = 2 * hidden * queries + 2 * hidden * keys
    if kind in _QKV_BIAS:
        attention += queries + 2 * keys
    elif text.get("attention_bias"):
        attention += queries + 2 * keys + hidden
    if kind in _QK_NORM:
        attention += 2 * head_dim
    dense_size = int(text.get("intermediate_size") or 0)
    dense = 3 * hidden * dense_size + (2 * dense_size + hidden if text.get("mlp_bias") else 0)
    per_attention = 2 * (hidden + queries) + 2 * (hidden + keys)
    if kind not in ("qwen3_moe", "mixtral"):
        linear = per_attention + 3 * (hidden + dense_size)
        return _Counted([attention + dense + 2 * hidden] * layers, linear * layers)
    sizes = [
        attention + 2 * hidden + (_experts(kind, text, hidden=hidden) if _is_sparse(text, index) else dense)
        for index in range(layers)
    ]
    return _Counted(sizes, None)


def _experts(kind: str, text: Mapping[str, Any], *, hidden: int) -> int:
    if kind == "mixtral":
        number, size = int(text["num_local_experts"]), int(text["intermediate_size"])
    else:
        number, size = int(text["num_experts"]), int(text["moe_intermediate_size"])
    return number * (3 * hidden * size + hidden)  # with the expert's row of the router


def _is_sparse(text: Mapping[str, Any], index: int) -> bool:
    if index in (text.get("mlp_only_layers") or ()):
        return False
    return (index + 1) % int(text.get("decoder_sparse_step") or 1) == 0


def _whole(text: Mapping[str, Any], name: str, where: str) -> int:
    value = text.get(name)
    if not isinstance(value, int) or value < 1:
        raise UserError(
            f"{where} has no {name}, so it is not the config.json of a language model that can be planned for"
        )
    return value
