"""Choose tensors by globs of their names and of the modules that make them."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from typing import Any

from torch import fx

from lightning_unitscale.arguments import nearest, shown
from lightning_unitscale.capture.graph_nodes import MODULE, tensor_name

# Prefixes of modules that torch wraps: by torch.compile, FullyShardedDataParallel and activation
# checkpoints.
_LISTS = (list, tuple, set, frozenset)
_WRAPPED = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})

# Reasons why a name is left out.
EXCLUDED = "name excluded"
NOT_INCLUDED = "name not included"


@functools.lru_cache(maxsize=2**14)
def own_path(name: str) -> str:
    """Return the path of a module or a parameter before torch wrapped parts of the model."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


class NamePatterns:
    """Globs to include and to exclude, such as ``"blocks.0.*"``."""

    def __init__(
        self,
        include: str | Sequence[str] | None = None,
        exclude: str | Sequence[str] | None = None,
        *,
        argument: str = "include",  # the name that messages have for ``include``
    ) -> None:
        self.include = _patterns(argument, include)
        self.exclude = _patterns("exclude", exclude)
        self._unmatched = [(argument, pattern) for pattern in self.include]
        self._unmatched += [("exclude", pattern) for pattern in self.exclude]
        self._names: dict[str, None] = {}  # kept as long as a pattern is unmatched

    def match(self, node: fx.Node) -> bool:
        """Check that the node's module path or tensor name is included and not excluded."""
        return self.match_names(tensor_name(node), str(node.meta.get(MODULE, "")))

    def match_names(self, *names: str) -> bool:
        """Check that one of the names of a tensor is included and none is excluded."""
        if self._unmatched:
            self._note(names)
        if not self.include and not self.exclude:
            return True
        if any_matches(self.exclude, names):
            return False
        return not self.include or any_matches(self.include, names)

    def why_not(self, *names: str) -> str:
        """Return why :meth:`match_names` refuses these names, or an empty text."""
        if any_matches(self.exclude, names):
            return EXCLUDED
        return "" if self.match_names(*names) else NOT_INCLUDED

    def take_unmatched(self) -> list[str]:
        """Return warnings about the patterns that have matched no name so far, each once."""
        texts = []
        for argument, pattern in self._unmatched:
            meant = self._meant(pattern)
            expected = "" if meant is None else f", such as {meant!r}"
            texts.append(
                f"{argument}={pattern!r}: matches nothing. Expected a glob of module paths or "
                f"tensor names{expected}. Correct it or leave it out."
            )
        self._unmatched = []
        self._names = {}
        return texts

    def _note(self, names: Sequence[str]) -> None:
        new = [name for name in names if name and name not in self._names]
        self._names.update(dict.fromkeys(new))
        self._unmatched = [
            (argument, pattern)
            for argument, pattern in self._unmatched
            if not any_matches((pattern,), new)
        ]

    def _meant(self, pattern: str) -> str | None:
        """Suggest a module without its tensors, a word without its path, or a corrected name."""
        for wider in (f"{pattern}.*", f"*.{pattern}", f"*{pattern}*"):
            if any_matches((wider,), tuple(self._names)):
                return wider
        return nearest(pattern, self._names)


def any_matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    """Check whether a name matches a glob, or is the glob: a name may contain its characters."""
    return any(
        name == pattern or fnmatch.fnmatchcase(name, pattern)
        for pattern in patterns
        for name in names
    )


def _patterns(name: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    patterns: tuple[Any, ...] = (value,)
    if value is None or isinstance(value, _LISTS):
        patterns = tuple(value or ())
    for pattern in patterns:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError(
                f"{name}={shown(value)}: {shown(pattern)} is not a pattern. Expected globs of "
                f"module paths or tensor names. Pass for example {name}=['blocks.0.*']."
            )
    return patterns
