"""A calculator for text that nobody has checked: numbers, parentheses, ``+ - * /``, and nothing else."""

from __future__ import annotations

import ast
import operator
import re
from fractions import Fraction

LONGEST = 100
"""Characters of the longest expression."""
ALLOWED = re.compile(r"[0-9\s.()+*/-]+")
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
SIGNS = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class CalculationError(ValueError):
    """The text is not an expression that can be calculated."""


def calculate(expression: str) -> Fraction:
    """Return the value of an expression, exactly.

    The text is parsed, and only the listed nodes of the syntax tree are calculated; it is never executed.

    Raises:
        CalculationError: it is malformed, too long, contains anything else, or divides by zero.
    """
    text = expression.strip()
    if len(text) > LONGEST:
        raise CalculationError(f"the expression has {len(text)} characters, more than {LONGEST}")
    if not ALLOWED.fullmatch(text):
        raise CalculationError(f"{text!r} has other characters than digits, points, parentheses and + - * /")
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # of the parser, or of _value
        raise CalculationError(f"{text!r} is not an expression: {error}") from error
    except ZeroDivisionError as error:
        raise CalculationError(f"{text!r} divides by zero") from error


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return Fraction(str(number))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in SIGNS:
            return SIGNS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left), _value(right))
    raise CalculationError(f"it contains {type(node).__name__}; expected numbers, parentheses and + - * /")
