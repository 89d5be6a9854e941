"""A rule as data: one row of the table, and that row bound to one overload of an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .violations import Finding

Arguments = Mapping[str, Any]
Check = Callable[["Plan", Arguments], Finding | None]
"""Answers a ``Finding`` where torch 1.2 would have raised, None where not."""

Named = tuple[tuple[str, int, str], ...]


@dataclass(frozen=True)
class Entry:
    """One row: the rule of one operation."""

    rule: str
    check: Check
    reference: str = "self"
    """The argument whose dtype the others must have."""
    named: Named = ()
    """(today's argument name, torch 1.2's number of it, torch 1.2's name of it)."""
    scalar_like: bool = False
    """A 0-dim tensor counts as a number."""
    numbers: tuple[str, ...] = ()
    """Arguments that torch 1.2 cast to the tensors' dtype: Python numbers never promote."""
    words: str = ""
    """The message, for ``floating_only``."""
    always: bool = False
    """Judged even where every tensor has one and the same floating dtype."""
    words_along: str = ""
    """The message when the operation goes along a dimension, where that is another one."""


@dataclass(frozen=True)
class Plan(Entry):
    """An entry bound to one overload: where its arguments stand."""

    base: str = ""
    operation: str = ""
    in_place: bool = False
    inputs: tuple[str, ...] = ()
    """Tensor arguments that are read, in order."""
    places: tuple[tuple[int, str], ...] = ()
    """Position and name of every tensor argument whose dtype is judged."""
    names: tuple[str, ...] = field(default=(), repr=False)

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The call's arguments by name."""
        return {**dict(zip(self.names, args, strict=False)), **kwargs}

    def plain(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether every judged tensor has one and the same floating dtype: the fast path."""
        first = None
        count = len(args)
        for position, name in self.places:
            value = args[position] if position < count else kwargs.get(name)
            if value is None:
                continue
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                dtype = getattr(tensor, "dtype", None)
                if dtype is None or dtype is first:
                    continue
                if first is not None:
                    return False
                first = dtype
        return first is None or first.is_floating_point
