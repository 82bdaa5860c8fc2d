"""Numeric types with a range, for the parameters of components."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

Positive: TypeAlias = Annotated[float, Field(gt=0)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0)]
Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
AboveOne: TypeAlias = Annotated[float, Field(gt=1)]
