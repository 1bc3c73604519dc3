"""Check arguments: each error names the argument, its value and the expected values."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LONGEST_SHOWN = 100


def shown(value: object) -> str:
    """Return a value on one line for an error, cut if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST_SHOWN else f"{text[: _LONGEST_SHOWN - 3]}..."


def sentence(text: str) -> str:
    """Return a clause as a sentence."""
    return f"{text[:1].upper()}{text[1:]}."


def check_choice(name: str, value: object, choices: Sequence[str], what: str, advice: str) -> None:
    """Refuse an argument that is not one of its choices."""
    if not isinstance(value, str) or value not in choices:
        *first, last = map(repr, choices)
        expected = f"{', '.join(first)} or {last}"
        raise ValueError(f"{name}={shown(value)}: {what}. Expected {expected}. {sentence(advice)}")


def check_depth(depth: object) -> None:
    """Refuse every depth but ``"products"``, the only supported one."""
    if not isinstance(depth, str) or depth != "products":
        raise ValueError(
            f"depth={shown(depth)}: only matmuls are scaled. Expected 'products'. Leave depth out, "
            "and train in FP16 with Trainer(precision='16-mixed'), whose gradient scaler keeps the "
            "other gradients in range."
        )


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Refuse an argument that is not a whole number, or is too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(
            f"{name}={shown(value)}: not a count. Expected a whole number of at least {least}. "
            f"Pass {name}={least} or more."
        )


def check_positive(name: str, value: object, what: str) -> None:
    """Refuse an argument that is not a positive, finite number."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(
            f"{name}={shown(value)}: not a number of {what}. Expected a finite number above 0. "
            f"Pass for example {name}=1.0."
        )


def check_flag(name: str, value: object) -> None:
    """Refuse an argument that is neither ``True`` nor ``False``."""
    if not isinstance(value, bool):
        raise ValueError(
            f"{name}={shown(value)}: not a flag. Expected True or False. Pass one of them."
        )


def check_instance(
    name: str, value: object, kinds: type | tuple[type, ...], expected: str, advice: str
) -> None:
    """Refuse an argument of another type."""
    if not isinstance(value, kinds):
        kind = type(value).__name__
        article = "an" if kind[:1].lower() in "aeiou" else "a"
        raise TypeError(
            f"{name}={shown(value)}: it is {article} {kind}. Expected {expected}. "
            f"{sentence(advice)}"
        )


def check_callable(name: str, value: object, expected: str, advice: str) -> None:
    """Refuse an argument that cannot be called. See :func:`check_instance`."""
    check_instance(name, value, Callable, expected, advice)  # type: ignore[arg-type]


def checked_folder(name: str, value: Any) -> Path:
    """Return a folder that files can be written to, and create it if it does not exist."""
    check_instance(name, value, (str, os.PathLike), "the path of a folder", "pass its path")
    folder = Path(os.path.expanduser(value))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(folder, os.W_OK | os.X_OK) else "permission denied"
    except (OSError, ValueError) as error:  # ValueError for a zero byte in the path
        why = str(getattr(error, "strerror", None) or error).lower()
    if not os.fspath(value):
        why = "the path is empty"
    if why:
        raise ValueError(
            f"{name}={shown(os.fspath(value))}: this folder is not writable ({why}). "
            "Expected a folder that exists or can be created. Pass another one."
        )
    return folder


def check_file(name: str, value: Any) -> None:
    """Refuse the path of a file that cannot be written, without creating anything."""
    check_instance(name, value, (str, os.PathLike), "the path of a file", "pass its path")
    path = Path(value)
    why = ""
    if path.is_dir():
        why = "it is a folder"
    elif not path.parent.is_dir():
        why = f"{path.parent} is not a folder"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        why = "permission denied"
    if why:
        raise ValueError(
            f"{name}={shown(os.fspath(value))}: this file cannot be written ({why}). Expected a "
            "file in a folder that exists. Pass another path."
        )


def check_picture(name: str, value: Any) -> None:
    """Refuse the path of a picture in a format that matplotlib cannot write."""
    check_file(name, value)
    suffix = Path(value).suffix[1:]
    if not suffix or find_spec("matplotlib") is None:  # whose absence is reported later
        return
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    what = f"no format of pictures, in {name}={shown(os.fspath(value))}"
    check_choice("suffix", suffix.lower(), known, what, "pass a path such as picture.png")


def is_same(value: object, default: object) -> bool:
    """Check whether an argument has its default value. Tensors compare by element."""
    return value is default or (type(value) is type(default) and bool(value == default))


def nearest(name: str, others: Iterable[str]) -> str | None:
    """Return the name most similar to the given one, or ``None`` if there are none."""
    found = difflib.get_close_matches(name, list(others), n=1, cutoff=0.0)
    return found[0] if found else None
