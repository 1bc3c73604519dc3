"""Which nodes a person means by globs of module paths or tensor names."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from torch import fx

from lightning_unitscale.graph.nodes import MODULE, tensor_name


class NamePatterns:
    """Globs to include and to exclude, such as ``"blocks.0.*"``.

    Args:
        include: Globs of module paths or tensor names; everything for ``None``.
        exclude: Globs to leave out, stronger than ``include``.

    Raises:
        ValueError: If one of them is no text, or empty.
    """

    def __init__(
        self,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
    ) -> None:
        self.include = _patterns("include", include)
        self.exclude = _patterns("exclude", exclude)

    def match(self, node: fx.Node) -> bool:
        """Whether the node's module path or its tensor's name is included and not excluded."""
        return self.match_names(tensor_name(node), str(node.meta.get(MODULE, "")))

    def match_names(self, *names: str) -> bool:
        """Whether one of the names of a tensor is included and none is excluded."""
        if _any_matches(self.exclude, names):
            return False
        return not self.include or _any_matches(self.include, names)


def _any_matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, one) for one in patterns for name in names)


def _patterns(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value or ())
    for one in patterns:
        if not isinstance(one, str) or not one:
            raise ValueError(
                f"{name}={value!r}: {one!r} is no pattern; expected globs of module paths or "
                "tensor names; pass for example include=['blocks.0.*']."
            )
    return patterns
