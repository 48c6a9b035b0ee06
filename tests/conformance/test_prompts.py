"""A prompt gets the same token ids as in TRL's GRPOTrainer, in both formats and with template arguments."""

from types import SimpleNamespace
from typing import Any

import pytest

from services.trainer.data.prompt_encoder import PromptEncoder
from shared.messages import Prompt
from tests.conformance.oracle import trl
from tests.tiny_model import make_tiny_tokenizer

SYSTEM, USER = {"role": "system", "content": "abc"}, {"role": "user", "content": "cab"}
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}="
    "{% if not thinking %}z{% endif %}{% endif %}"
)


@pytest.mark.parametrize("prompt", ["cab", [USER], [SYSTEM, USER]])
@pytest.mark.parametrize("template_kwargs", [None, {"thinking": True}, {"thinking": False}])
def test_a_prompt_becomes_trls_token_ids(prompt: Prompt, template_kwargs: dict[str, Any] | None) -> None:
    tokenizer = make_tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        chat_template=None,
        chat_template_kwargs=template_kwargs or {},
        tools=None,
        environment_factories=None,
        _is_vlm=False,
    )
    theirs = trl.GRPOTrainer._tokenize_prompts(trainer, [prompt])[0][0]
    ours = PromptEncoder(tokenizer, chat_template_kwargs=template_kwargs).encode(prompt)
    assert ours == list(theirs)
    assert len(ours) > 2
