"""Sizes are converted to numbers without a guard of Dynamo."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_unitscale.functional.rules import (
    concrete_size,
    numel_of,
    product,
    shape_of,
    specialized,
    tuple_of,
)


def test_symbolic_sizes_use_their_hints() -> None:
    seen: list[Any] = []

    def backend(graph_module: Any, example_inputs: Any) -> Any:
        tensor = graph_module.graph.find_nodes(op="output")[0].args[0][0].meta["example_value"]
        seen.extend([tensor.shape[0], shape_of(tensor), numel_of(tensor)])
        return graph_module.forward

    x = torch.ones(5, 3)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(lambda a: a * 2, backend=backend)
    compiled(x)
    compiled(torch.ones(7, 3))
    assert isinstance(seen[0], torch.SymInt)
    assert concrete_size(seen[0]) == 5
    assert seen[1:] == [(5, 3), 15], "a guard on the size would have compiled it twice"


def test_data_dependent_size_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"size=u0: it depends on the values of a tensor"):
        concrete_size(ShapeEnv().create_unbacked_symint())


def test_numbers_have_no_shape() -> None:
    assert shape_of(3.0) == ()
    assert numel_of(3.0) == product([]) == 1
    assert specialized(4) == 4


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, (9, 9)), (3, (3, 3)), ((3,), (3, 3)), ([3, 4], (3, 4)), ([], (9, 9))],
)
def test_scalar_is_repeated_per_dimension(value: Any, expected: tuple[int, ...]) -> None:
    assert tuple_of(value, 2, 9) == expected
