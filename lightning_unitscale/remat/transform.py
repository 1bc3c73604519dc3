"""``transforms.remat``: a plain module that trains within a memory budget."""

from __future__ import annotations

from torch import nn

from lightning_unitscale.graph.steps import steps_of
from lightning_unitscale.remat.budget import Budget
from lightning_unitscale.remat.report import RematReport
from lightning_unitscale.remat.step_partitioner import StepPartitioner
from lightning_unitscale.transforms.attach import captured_forward


def remat(module: nn.Module, budget: Budget) -> nn.Module:
    """A copy of ``module`` that computes the same bits in less memory.

    Its forward and backward graph are planned together when it is first called with gradients: what
    is kept between them and what runs again, at the least estimated time within the budget::

        model = remat(model, "600MiB")
        model(inputs).sum().backward()
        print(model.remat_table())

    Args:
        module: A module, transformed or not, that Dynamo can capture; it is left as it is.
        budget: Limit on all tensor bytes alive at once in a step of the module: parameters,
            buffers, inputs, activations and gradients. An int or a string such as ``"600MiB"`` is
            in bytes, a float in (0, 1] a fraction of the peak without rematerialization;
            ``"min_cut"`` keeps as little as no further matrix product allows.

    Returns:
        A new module with parameters of its own, ``remat_table()``, ``remat_reports()`` and
        ``explain()``. Its graphs run op by op, or by Inductor after ``transforms.compile``.

    Raises:
        ValueError: If the budget is malformed or ``module`` was compiled by the user; at the first
            call, if the budget is below the floor, which the message names.
    """
    partitioner = StepPartitioner(budget, module)
    new, step = captured_forward(module, "remat")
    partitioner = StepPartitioner(partitioner.budget, new)
    step.owner.partition_by(partitioner)
    new.__dict__["remat_table"] = _Table(new)
    new.__dict__["remat_reports"] = _Reports(new)
    return new


def _partitioner_of(module: nn.Module) -> StepPartitioner:
    steps = steps_of(module)
    assert steps is not None
    partitioner = steps.partition_fn
    assert isinstance(partitioner, StepPartitioner)
    return partitioner


class _Table:
    """``module.remat_table()``: an object rather than a closure, so that a copy shows its own."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> str:
        """What was planned for each graph."""
        return _partitioner_of(self.module).table()


class _Reports:
    """``module.remat_reports()``: the reports of the plans."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self) -> list[RematReport]:
        """What was planned for each graph, in the order of capture."""
        return list(_partitioner_of(self.module).reports)
