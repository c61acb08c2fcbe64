"""
What the cache has to know of each recurrence: one module each. How it is computed is in `ops`, how a model calls it in
`models`; what every recurrence shares (checkpoint, ring of slots, positions, rollback) is the cache's own.
"""

from .base import Input, Recurrence, Window
from .mamba1 import Mamba1
from .mamba2 import Mamba2


RECURRENCES: dict[str, type[Recurrence]] = {recurrence.name: recurrence for recurrence in (Mamba2, Mamba1)}

__all__ = ["RECURRENCES", "Input", "Mamba1", "Mamba2", "Recurrence", "Window"]
