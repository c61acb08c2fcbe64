"""
What the cache has to know of each recurrence: one module each. How it is computed is in `ops`, how a model calls it in
`models`; what every recurrence shares (checkpoint, ring of slots, positions, rollback) is the cache's own.
"""

from .base import Input, Recurrence, Window
from .mamba2 import Mamba2


RECURRENCES: dict[str, type[Recurrence]] = {recurrence.name: recurrence for recurrence in (Mamba2,)}

__all__ = ["RECURRENCES", "Input", "Mamba2", "Recurrence", "Window"]
