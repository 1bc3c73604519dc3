"""Triton's kernels where no GPU is: interpreted, or compiled and read, and never run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

CAPABILITIES = (80, 90, 100)
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run_interpreted(name: str, *options: str, has_loops: bool = False) -> None:
    """Run the tests of a file in Triton's interpreter.

    Triton decides when it is imported whether it interprets, so they have a process of their own.

    Args:
        name: The file, from the folder of tests on.
        options: For pytest.
        has_loops: Whether kernels have a loop whose end is not a constant.
    """
    is_old = version("triton").startswith("3.6.")
    if has_loops and is_old and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip(
            "the interpreter of Triton 3.6 takes int() of an array of one element as the end of a "
            "loop, which NumPy 2.4 and later refuse"
        )
    path = Path(__file__).parent / name
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", path, *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[1]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2000:]


@dataclass(frozen=True)
class Build:
    """The compiled form of a kernel.

    Attributes:
        ptx: The code that the assembler was given.
        registers: Of each thread.
        spilled_bytes: Written or read for want of registers.
        stack_bytes: Local memory of each thread.
    """

    ptx: str
    registers: int
    spilled_bytes: int
    stack_bytes: int


def build(kernel: Any, arguments: dict[str, Any], capability: int, num_warps: int) -> Build:
    """Compile a kernel to a cubin.

    Args:
        kernel: What ``triton.jit`` has made.
        arguments: By name: a type, such as ``"*bf16"`` or ``"i32"``, with ``":16"`` behind it where
            the value is a multiple of 16, as pointers are; or the value of a constant.
        capability: The compute capability, times ten.
        num_warps: Warps of a program.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for position, name in enumerate(kernel.arg_names):
        value = arguments[name]
        is_type = isinstance(value, str)
        signature[name] = value.removesuffix(":16") if is_type else "constexpr"
        if not is_type:
            constants[name] = value
        elif value.endswith(":16"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": num_warps})
    assert compiled.asm["cubin"]
    return _assembled(compiled.asm["ptx"], capability)


def _assembled(ptx: str, capability: int) -> Build:
    import triton

    programs = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    program = programs / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.ptx")
        path.write_text(ptx)
        command = [program, "-v", f"--gpu-name={target}", path, "-o", path.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stack, *spills = re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", said)
    (registers,) = re.findall(r"Used (\d+) registers", said)
    return Build(ptx, int(registers), sum(map(int, spills)), int(stack))
