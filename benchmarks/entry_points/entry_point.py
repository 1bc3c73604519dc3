"""An entry point: a package's own training call, and what is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from measure import versions_of
from torch import nn

from lightning_unitscale import attach


@dataclass(frozen=True)
class Trained:
    """What a package's training leaves.

    Args:
        module: The trained module, whose weights are compared.
        numbers: What the package itself reports: losses it has kept, metrics, forecasts.
        callbacks: Those that worked, where the package copies what it is given.
    """

    module: nn.Module
    numbers: Any
    callbacks: Sequence[Any] = ()


@dataclass(frozen=True)
class EntryPoint:
    """A call of a package that trains a module of its own.

    Args:
        name: What the script's command line takes.
        call: The call, as the table shows it.
        way_in: How it gets the callbacks, as the table shows it.
        requires: Distributions on PyPI that it needs, the package first.
        loop: The distribution whose training loop runs, if it is another one.
        imports: Modules that it imports, so that it can be done beforehand.
        train: Trains with these callbacks, of which there may be none, and may write to the folder.
    """

    name: str
    call: str
    way_in: str
    requires: tuple[str, ...]
    loop: str
    imports: tuple[str, ...]
    train: Callable[[list[Any], Path], Trained]

    def missing(self) -> list[str]:
        """The distributions that are not installed."""
        return [name for name, version in self.versions().items() if version is None]

    def versions(self) -> dict[str, str | None]:
        """The version of each, ``None`` for those that are not installed."""
        return versions_of((*self.requires, self.loop))

    def load(self) -> None:
        """Import what the training imports."""
        for name in self.imports:
            import_module(name)


def given(callbacks: list[Any]) -> dict[str, list[Any]]:
    """The keyword argument ``callbacks``, left out where there are none, as users do."""
    return {"callbacks": callbacks} if callbacks else {}


@contextmanager
def attached(module: nn.Module, optimizer: Any, callbacks: list[Any], **how: Any) -> Iterator[None]:
    """Attach the callbacks, if there are any."""
    if callbacks:
        with attach(module, optimizer, callbacks, **how):
            yield
    else:
        yield
