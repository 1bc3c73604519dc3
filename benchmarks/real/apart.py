"""Call a function in its own process, which may crash or hang."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch


@dataclass(frozen=True)
class Failure:
    """What came in place of a result: one line, and where it was raised."""

    text: str
    details: str = ""


def apart(
    method: Literal["spawn", "fork"], seconds: float, function: Callable[..., Any], *arguments: Any
) -> Any:
    """The function's result, or a :class:`Failure`.

    Args:
        method: A spawned process begins anew; a forked one has everything that is imported here.
        seconds: After this long the process is ended.
        function: What to call.
        *arguments: Its arguments.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result"
        context = multiprocessing.get_context(method)
        process = context.Process(target=_save, args=(path, function, arguments))
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return Failure(f"not done after {seconds:.0f} s")
        if not path.exists():
            return Failure(f"the process ended with code {process.exitcode}")
        return torch.load(path, weights_only=False)


def _save(path: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        result = function(*arguments)
    except Exception as error:
        text = (str(error).strip() or "no message").splitlines()[0]
        result = Failure(f"{type(error).__name__}: {text}", traceback.format_exc())
    torch.save(result, path)
