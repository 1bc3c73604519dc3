"""Rows of results that a reentrant checkpoint computes without gradients, and then with them."""

from __future__ import annotations

from collections import Counter, defaultdict

from lightning_unitscale.watching.names import Caller
from lightning_unitscale.watching.rows import TensorRow


class Checkpoints:
    """The rows of each checkpoint, in the order in which its recomputation comes by them."""

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[TensorRow, str]]] = defaultdict(list)
        self._num_again: Counter[int] = Counter()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was computed within a checkpoint."""
        return not self._kept

    def keep(self, caller: Caller, row: TensorRow, word: str) -> None:
        """Keep the row of a result for the checkpoints around the call that has made it.

        Args:
            caller: Where it was made.
            row: Its row.
            word: What its function is called.
        """
        for checkpoint in caller.checkpoints:
            self._kept[checkpoint].append((row, word))

    def next_row(self, caller: Caller, word: str) -> TensorRow | None:
        """The row of a result that is computed again; ``None`` for one that was not there before.

        Args:
            caller: Where it is made.
            word: What its function is called.
        """
        assert caller.again is not None
        kept, number = self._kept.get(caller.again, ()), self._num_again[caller.again]
        if number >= len(kept) or kept[number][1] != word:
            return None
        self._num_again[caller.again] += 1
        row, _ = kept[number]
        self.keep(caller, row, word)
        return row
