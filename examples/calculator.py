"""A tool as users of TRL write them: type hints, and a docstring that the model sees.

Use it in a run file as ``tools: [calculator:calculate]``, with ``headrace up`` started in this directory.
gsm8k-calculator-qwen3-0.6b.yaml is such a run file.
"""

import ast
import operator
from collections.abc import Callable

_OPERATIONS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> float:
    """Calculate with numbers.

    Args:
        expression: Numbers with +, -, *, / and parentheses, such as "(3 + 4) * 2.5".

    Returns:
        The value of the expression.
    """
    return _value(ast.parse(expression, mode="eval").body)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left, operation, right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(operation, operand) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(operand))
        case _:
            raise ValueError("only numbers with +, -, *, / and parentheses can be calculated")
