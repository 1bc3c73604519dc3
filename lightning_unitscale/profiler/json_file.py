"""Profiles as JSON: frozen dataclasses out and in again."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")
_VERSION = 1


def dump(profile: Any) -> str:
    """A dataclass as JSON; fields that start with an underscore stay out."""
    return json.dumps({"version": _VERSION, **_plain(profile)})


def load(text: str, kind: type[T]) -> T:
    """A dataclass from JSON.

    Raises:
        ValueError: If the text was not made by :func:`dump` for this class.
    """
    try:
        content = json.loads(text)
        if content.pop("version", None) != _VERSION:
            raise ValueError(f"expected version {_VERSION}")
        return typing.cast(T, _typed(content, kind))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"`text`: it is no profile ({error}); expected what GraphProfile.to_json() gave "
            "in this version; profile again."
        ) from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            one.name: _plain(getattr(value, one.name))
            for one in dataclasses.fields(value)
            if not one.name.startswith("_")
        }
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value


def _typed(value: Any, kind: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _typed(value, arguments[0])
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(  # type: ignore[operator]
            **{name: _typed(one, hints[name]) for name, one in value.items()}
        )
    if origin is dict:
        return {key: _typed(one, arguments[1]) for key, one in value.items()}
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(_typed(one, arguments[0]) for one in value)
        return tuple(_typed(*one) for one in zip(value, arguments, strict=True))
    return value
