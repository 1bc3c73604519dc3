"""What is no part of the model runs outside of Dynamo, and is what it was afterwards."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_unitscale.graph.steps import ModuleSteps
from lightning_unitscale.graph.untraced import UntracedCalls, plain_forward


class Updating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().sum()

    def update(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def step(self, x: Tensor) -> None:
        loss = self.forward(x)
        self.optimizer.zero_grad()
        loss.backward()
        self.update()

    def step_with_closure(self, x: Tensor) -> None:
        def closure() -> Tensor:
            loss = self.forward(x)
            self.optimizer.zero_grad()
            loss.backward()
            return loss

        self.update(closure)


@pytest.mark.parametrize("name", ["step", "step_with_closure"])
def test_an_optimizer_computes_what_it_computes_untraced(name: str) -> None:
    weights = []
    for is_captured in (False, True):
        torch.manual_seed(2)
        module = Updating()
        if is_captured:
            steps = ModuleSteps(module, [name], untraced=lambda one: [(one, "update")])
            steps.attach("test")
        for _ in range(5):
            getattr(module, name)(torch.randn(4, 3))
        weights.append(module.linear.weight.detach().clone())
        if is_captured:
            assert steps.steps[name].num_graph_calls == 1
            assert "update" not in module.__dict__
            steps.detach("test")
    assert torch.equal(*weights)


def test_methods_are_put_back_and_keep_their_marks() -> None:
    module = Updating()
    module.update = own = lambda: 3
    own.mark = True
    calls = UntracedCalls(lambda: [(module, "update"), (module, "forward")], lambda one: one)
    with pytest.raises(KeyError), calls.replaced():
        assert module.update is not own
        assert module.update.mark
        assert module.update() == 3
        first = module.update
        with calls.replaced():  # a step within a step
            assert module.update is first
            assert module.update() == 3
        raise KeyError
    assert module.__dict__["update"] is own
    assert "forward" not in module.__dict__
    with calls.replaced():
        assert module.update is first


def test_a_forward_that_is_on_the_instance_for_nothing() -> None:
    module = Updating()
    module.forward = own = module.forward
    with plain_forward(module):
        assert "forward" not in module.__dict__
    assert module.__dict__["forward"] is own
    module.forward = other = lambda x: x
    with plain_forward(module):
        assert module.forward is other
