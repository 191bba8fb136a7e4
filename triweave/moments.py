"""How AdamW's two moments are stored, and the decay rates that their type can follow (docs/decisions/0015)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

MomentsDtype = Literal["float32", "bfloat16"]

MOMENTS_BYTES: Mapping[MomentsDtype, int] = MappingProxyType({"float32": 8, "bfloat16": 4})
"""Bytes that both moments of one parameter take together."""

LEAST_SHARES: Mapping[MomentsDtype, float] = MappingProxyType({"float32": 0.0, "bfloat16": 2.0**-6})
"""The least 1 - beta. A step moves a moment x by (1 - beta) times what it lacks. Rounding to bfloat16's 8 bits errs by
up to 2^-8 of x, so that a moment stands still within 2^-8 / (1 - beta) of where it should be: a quarter of x at this
limit, and all of x, so that it never falls, where 1 - beta is 2^-8."""
