"""Conformance modules train bit-identically with and without the package on an accelerator."""

from __future__ import annotations

import pytest
import torch

from tests.conformance.cases import Case
from tests.conformance.harness import differences, train
from tests.conformance.test_conformance import CASES, INEXACT
from tests.gpu.models import device_name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All odd modules on a GPU; in a rehearsal the first of each theme: elsewhere all are run."""
    first = {case.name.partition("-")[0]: case for case in reversed(CASES)}
    cases = CASES if device_name(metafunc.config) == "cuda" else list(first.values())
    metafunc.parametrize("case", cases, ids=lambda case: case.name)


def test_conformance_modules_are_bit_identical(case: Case, device: torch.device) -> None:
    if case.on_cpu and device.type != "cpu":
        pytest.skip(f"tests/conformance runs it: {case.on_cpu}")
    try:
        plain, again = (train(case, "plain", device.type) for _ in range(2))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        if "same device" in str(error):
            raise  # it is the case's fault
        pytest.skip(f"without the package, it does not run there: {error}")
    if differences(again, plain):
        pytest.skip("without the package, it is not reproducible there")
    # In units some differ on a CPU as well.
    methods = ("monitor",) if case.name in INEXACT else ("lossless", "both")
    found = {method: differences(train(case, method, device.type), plain) for method in methods}
    assert found == {method: [] for method in methods}
