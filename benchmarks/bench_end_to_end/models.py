"""Makes the initial model and the data of a work: ``python -m benchmarks.bench_end_to_end.models TASK RESULT``.

The demo's come from its own warm-up. A letters model is trained on its teacher's exact probabilities until the two are
close, so that completions get the teacher's lengths. Embeddings are untied, as in the demo.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.bench_end_to_end.works import P_IN_ORDER, WORKS, Work
from headrace.demo import task
from headrace.demo.model import SPECIAL, make_tokenizer
from headrace.demo.task import LETTERS
from headrace.demo.warmup import warm_up

_EOS = SPECIAL.index("<eos>")
_FIRST = len(SPECIAL)
_VOCABULARY = _FIRST + len(LETTERS)
_MAX_POSITIONS = 576
_CLOSE_NATS = 0.004
_MAX_STEPS = 600


def make(work: Work, directory: Path, *, seed: int) -> dict[str, Any]:
    """Write ``model``, ``train.jsonl`` and, for the demo, ``test.jsonl``."""
    if work.shape is None:
        splits = task.make_splits(seed)
        task.write_jsonl(directory / "train.jsonl", splits.train)
        task.write_jsonl(directory / "test.jsonl", splits.test)
        return {"steps": warm_up(directory / "model", splits, seed=seed).step}
    rows = work.prompts(seed)
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    tokenizer = make_tokenizer(frame=(), max_positions=_MAX_POSITIONS)
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=_VOCABULARY,
            hidden_size=work.shape.hidden_size,
            intermediate_size=work.shape.intermediate_size,
            num_hidden_layers=work.shape.num_layers,
            num_attention_heads=work.shape.num_heads,
            num_key_value_heads=work.shape.num_heads,
            head_dim=work.shape.hidden_size // work.shape.num_heads,
            max_position_embeddings=_MAX_POSITIONS,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=False,
            pad_token_id=SPECIAL.index("<pad>"),
            bos_token_id=SPECIAL.index("<bos>"),
            eos_token_id=_EOS,
            dtype="float32",
        )
    )
    found = _imitate(model, teacher(work.end_probability))
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")  # pyright: ignore[reportUnknownMemberType]
    return found | {"weights": sum(parameter.numel() for parameter in model.parameters())}


def teacher(end_probability: float) -> torch.Tensor:
    """Return the teacher's probabilities of the next token, by current token: ``(V, V)``."""
    probabilities_VV = torch.zeros(_VOCABULARY, _VOCABULARY)
    num = len(LETTERS)
    letters = (1 - end_probability) * (1 - P_IN_ORDER) / (num - 1)
    probabilities_VV[:, _FIRST:] = letters
    for index in range(num):
        probabilities_VV[_FIRST + index, _FIRST + (index + 1) % num] = (1 - end_probability) * P_IN_ORDER
    probabilities_VV[:, _EOS] = end_probability
    return probabilities_VV


def _imitate(model: Any, probabilities_VV: torch.Tensor) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.98))
    ramp = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    recent: list[float] = []
    for step in range(1, _MAX_STEPS + 1):
        # Mostly short rows, because only the current token matters; sometimes rows of the greatest length.
        num_rows, num_tokens = (2, _MAX_POSITIONS) if step % 4 == 0 else (8, 96)
        ids_BT = _walks(probabilities_VV, num_rows, num_tokens)
        logprobs_BTV = torch.log_softmax(model(input_ids=ids_BT).logits, dim=-1)
        wanted_BTV = probabilities_VV[ids_BT]
        entropy = -(wanted_BTV * wanted_BTV.clamp_min(1e-9).log()).sum(-1).mean()
        loss = -(wanted_BTV * logprobs_BTV).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ramp.step()
        recent = [*recent[-7:], float(loss - entropy)]
        if len(recent) == 8 and max(recent) < _CLOSE_NATS:
            return {"steps": step, "nats_from_teacher": max(recent)}
    raise SystemExit(f"after {_MAX_STEPS} steps the model is {max(recent):.4f} nats a token from its teacher")


def _walks(probabilities_VV: torch.Tensor, num_rows: int, num_tokens: int) -> torch.Tensor:
    """Return rows that the teacher could write, without ends."""
    in_order = torch.rand(num_rows, num_tokens) < P_IN_ORDER
    jumps = torch.randint(0, len(LETTERS), (num_rows, num_tokens))
    ids_BT = torch.empty(num_rows, num_tokens, dtype=torch.long)
    now = jumps[:, 0]
    for position in range(num_tokens):
        now = torch.where(in_order[:, position], (now + 1) % len(LETTERS), jumps[:, position])
        ids_BT[:, position] = now + _FIRST
    return ids_BT


def main() -> None:
    """Read the task, make everything, write the result."""
    torch.set_num_threads(1)  # on two threads a model this small trains five times slower if the other core is busy
    wanted = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = make(WORKS[wanted["work"]], Path(wanted["directory"]), seed=wanted["seed"])
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
