"""Makes the JSON schema of a tool from its type hints and its docstring, as TRL does: with transformers.

    def multiply(a: int, b: int) -> int:           {"type": "function", "function": {"name": "multiply",
        \"\"\"Multiply two numbers.                      "description": "Multiply two numbers.",
                                          --->       "parameters": {"type": "object", "properties": {
        Args:                                          "a": {"type": "integer", "description": "The first factor."},
            a: The first factor.                       ...
            b: The second factor.
        \"\"\"

Runs where the user's module may be imported, never in the service.
"""

from collections.abc import Callable
from typing import Any, cast

from shared.errors import UserError
from shared.user_code.error_text import describe

IMPORTS = "transformers.utils.chat_template_utils"
"""The module that takes a second to import."""


def tool_schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the schema of ``function``, in OpenAI's format. ``name`` appears only in the error.

    Raises:
        UserError: The function has no name, docstring or type hint. The message says what to add.
    """
    from transformers.utils import chat_template_utils

    # It would import torch, which takes seconds, only to recognise torch.Tensor. No JSON is a tensor.
    chat_template_utils.is_torch_available = _no  # pyright: ignore[reportPrivateImportUsage]
    try:
        return cast("dict[str, Any]", chat_template_utils.get_json_schema(function))
    except Exception as error:  # two exceptions of transformers, and any of type hints, which are user code
        raise UserError(
            f"{name} cannot be a tool: {describe(error)}. Define it with `def` or `async def`, give each argument a "
            "type hint, and write a docstring in Google's format: a description, then `Args:` with a line for each one"
        ) from error


def _no() -> bool:
    return False
