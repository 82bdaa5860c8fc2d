"""Arithmetic as a tool: what `tool_calling` has where no tools are named."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY: dict[type, Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_LONGEST = 200
"""Characters of an expression; without powers its value stays as small."""


def calculate(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression: numbers, brackets and + - * / // %, for example "(3 + 4) * 12".
    """
    if len(expression) > _LONGEST:
        raise ValueError(f"longer than {_LONGEST} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    raise ValueError(f"{ast.unparse(node)!r} is no arithmetic")
