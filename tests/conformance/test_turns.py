"""What follows a turn with a tool call has the token ids that TRL's GRPOTrainer appends, in the templates of TRL."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.generator.turns.rendering import TurnRenderer
from shared.arrays import pack_ids
from shared.turns import TurnRequest
from tests.conformance.oracle import trl
from tests.generator.turns.chat_models import a_call, a_tool, make_tokenizer

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# An unknown token, a role, a mark or an end; the fullwidth ones are DeepSeek's.
SPECIAL = re.compile("<\\|[^|>\\s]+\\|>|<\N{FULLWIDTH VERTICAL LINE}[^>]+\N{FULLWIDTH VERTICAL LINE}>")
RESULT = {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "2"}


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("qwen2_5", "<|im_end|>"),
        ("qwen3_training", "<|im_end|>"),
        ("qwen3_5_think", "<|im_end|>"),
        ("llama3_1", "<|eot_id|>"),
        ("gptoss_training", "<|call|>"),
        ("lfm2_v2", "<|im_end|>"),
        ("nemotron_3_nano", "<|im_end|>"),
    ],
)
def test_what_follows_a_call_is_what_trl_appends(name: str, end: str) -> None:
    tokenizer, end_id = tokenizer_for(name, end)
    trainer = SimpleNamespace(
        processing_class=tokenizer, _tokenizer=tokenizer, chat_template=None, chat_template_kwargs={}, _is_vlm=False
    )
    theirs: list[int] = trl.GRPOTrainer._get_tool_suffix_ids(trainer, [RESULT])
    ours = TurnRenderer(tokenizer).appended_ids(a_request(end_id))
    assert ours == theirs
    assert len(ours) > 5


def test_a_template_that_trl_must_replace_first_is_continued_as_its_replacement_is() -> None:
    """Qwen3's own template gives only the last message an empty thought, so TRL's prefixes do not agree."""
    own, replaced = (tokenizer_for(name, "<|im_end|>") for name in ("qwen3", "qwen3_training"))
    continued = [TurnRenderer(tokenizer).appended_ids(a_request(end_id)) for tokenizer, end_id in (own, replaced)]
    table = [
        tokenizer.convert_ids_to_tokens(ids) for (tokenizer, _), ids in zip((own, replaced), continued, strict=True)
    ]
    assert table[0] == table[1]


def tokenizer_for(name: str, end: str) -> tuple[Any, int]:
    template = (TEMPLATES / f"{name}.jinja").read_text()
    special = ["<unk>", *sorted({end, *SPECIAL.findall(template)})]
    return make_tokenizer(template, eos_token=end, special=special), special.index(end)


def a_request(last_id: int) -> TurnRequest:
    question = {"role": "user", "content": "1+1?"}
    called = {"role": "assistant", "content": "", "tool_calls": [a_call()]}
    return TurnRequest("run-1", "r", [question, called, RESULT], [a_tool()], pack_ids([last_id]), 2)
