"""A tokenizer with one token per character, and chat templates of several kinds, small enough to be read.

Token ids are worked out with ``ids_of``, which knows only the table of tokens, not the tokenizer.
In a template, a newline right after a statement is dropped, so there it is written as an expression.
"""

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<call|>", "<|result>", '<|"|>')
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Tokens of their own, but not special ones, as in Qwen's tokenizers."""
CHARACTERS = "\n " + "".join(map(chr, range(ord("!"), ord("~") + 1)))
_TABLE = {token: index for index, token in enumerate((*SPECIAL, *ADDED, *CHARACTERS))}

CALLS = (
    "{% for call in m.tool_calls or [] %}{% if content or not loop.first %}{{ '\n' }}{% endif %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
RESULTS = (
    "{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}"
)
QWEN_2_5 = (
    TOOLS
    + "{% for m in messages %}{% set content = m.content %}"
    + RESULTS
    + "<|im_start|>{{ m.role }}\n{{ content }}"
    + CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    + PROMPT
)
"""Renders every message in the same way, wherever it is: nothing before it matters. As in Qwen2.5, text and call have
a newline between them, and results of parallel calls are one turn of the user."""
QWEN_3 = (
    TOOLS
    + "{% set ns = namespace(last=-1) %}"
    + "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    + "{% for m in messages %}"
    + "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    + "{% set thought = m.reasoning_content or '' %}"
    + RESULTS
    + "<|im_start|>{{ m.role }}\n"
    + "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or thought) %}"
    + "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
    + CALLS
    + "<|im_end|>\n{% endif %}{% endfor %}"
    + PROMPT
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    + "<think>\n\n</think>\n\n{% endif %}"
)
"""Drops reasoning before the last user message, and gives the last message an empty thought, but not when another
message follows it: a conversation and its beginning are not rendered alike."""
ONLY_CALLS = (
    TOOLS
    + "{% for m in messages %}{% set content = '' %}"
    + "<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
    + CALLS
    + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    + PROMPT
)
"""Leaves out the text before a call, as Llama 3.1 does."""
NO_TOOLS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
ONE_CALL = (
    TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    + "{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}{{ raise_exception('only one call at once') }}"
    + "{% endif %}{% set f = m.tool_calls[0].function %}{% if f.arguments is not mapping %}"
    + "{{ raise_exception('arguments must be a mapping') }}{% endif %}"
    + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    + "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    + PROMPT
)
"""Refuses parallel calls, and takes even an empty list for calls, as Llama 3.1 does."""
GEMMA_4 = (
    TOOLS
    + "{% for m in messages %}{% if m.role == 'tool' %}<|result>{{ m.content }}<|im_end|>"
    + "{% elif m.tool_calls %}{% for call in m.tool_calls %}<tool_call>{{ call.function.name }}"
    + '{% for name, value in call.function.arguments.items() %}{{ name }}:<|"|>{{ value }}<|"|>{% endfor %}<call|>'
    + "{% endfor %}{% if loop.last %}<|result>{% endif %}"
    + "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    + "{% if add_generation_prompt and messages[-1].role == 'user' %}<|im_start|>assistant\n{% endif %}"
)
"""Writes special tokens around calls. A call goes on with its result, whose first token ends the turn."""
PARTS = (
    TOOLS
    + "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['tool_calls'] %}"
    + "{{ message['tool_calls'][0]['function']['arguments'] | tojson }}{% endif %}"
    + "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    + "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    + PROMPT
)
"""Reads contents as lists of parts, as templates of models with vision do."""
NINE = (
    TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"
    + "{% set id = m.tool_calls[0].id if m.tool_calls else m.tool_call_id %}{% if id %} {{ id }}"
    + "{% if id | length != 9 %}{{ raise_exception('ids must have length 9') }}{% endif %}{% endif %}"
    + "<|im_end|>\n{% endfor %}"
    + PROMPT
)
"""Requires ids of nine characters, as Mistral's templates do."""
NO_RESULTS = (
    TOOLS
    + "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + PROMPT
)
ONLY_USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}"


def make_tokenizer(
    chat_template: str | None, *, eos_token: str = "<|im_end|>", special: Sequence[str] = SPECIAL
) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose special tokens come first; the first of them stands for unknown characters."""
    table = {token: index for index, token in enumerate((*special, *ADDED, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ADDED])
    made: Any = PreTrainedTokenizerFast
    return made(
        tokenizer_object=tokenizer,
        unk_token=special[0],
        eos_token=eos_token,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def ids_of(text: str) -> list[int]:
    """Return the token ids of a text."""
    return [_TABLE[token] for token in re.findall("|".join(map(re.escape, SPECIAL + ADDED)) + r"|[\s\S]", text)]


def a_tool(name: str = "add") -> dict[str, Any]:
    """Return the schema of a tool."""
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}


def a_call(name: str = "add", arguments: str = '{"a": 1}', call_id: str = "c1") -> dict[str, Any]:
    """Return a tool call in OpenAI's format."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
