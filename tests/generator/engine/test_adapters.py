"""Engines for LoRA runs, except weight pushes (tests/weights)."""

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from services.generator.engine.adapter import AdapterSpec
from services.generator.engine.engine import start_engine
from services.generator.engine.engine_spec import EngineSpec
from shared.errors import UserError
from tests.tiny_model import EOS_TOKEN_ID, VOCAB_SIZE, make_tiny_tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.vllm]


async def test_a_model_that_vllm_serves_no_adapters_of_is_refused_before_an_engine_starts(
    vllm_environment: None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN_ID,
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    make_tiny_tokenizer().save_pretrained(tmp_path)
    spec = EngineSpec(str(tmp_path), None, "float32", 64, AdapterSpec(4, 8, None))
    with pytest.raises(UserError, match="vLLM does not support adapters of GPT2LMHeadModel; leave use_peft out"):
        await start_engine(spec, extra_args={}, has_cuda=False, timeout_s=100)
