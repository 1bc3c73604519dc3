"""Constraints, by their definitions."""

import pytest

from lightning_unitscale.functional.rules import apply_constraint


@pytest.mark.parametrize(
    ("constraint", "factors", "expected"),
    [
        (None, (2.0, 8.0), (2.0, 8.0)),
        ("to_output_scale", (2.0, 8.0, 4.0), (2.0, 2.0, 2.0)),
        ("to_output_scale", (2.0,), (2.0,)),
        ("gmean", (2.0, 8.0), (4.0, 4.0)),
        ("amean", (2.0, 8.0), (5.0, 5.0)),
        ("hmean", (2.0, 8.0), (3.2, 3.2)),
        ("gmean", (1.0, 8.0, 1.0), (2.0, 2.0, 2.0)),
        ("to_grad_input_scale", (2.0, 8.0), (8.0, 8.0)),
        ("to_left_grad_scale", (2.0, 8.0, 4.0), (8.0, 8.0, 8.0)),
        ("to_right_grad_scale", (2.0, 8.0, 4.0), (4.0, 4.0, 4.0)),
    ],
)
def test_constraint_values(
    constraint: str, factors: tuple[float, ...], expected: tuple[float, ...]
) -> None:
    assert apply_constraint(constraint, *factors) == pytest.approx(expected)


def test_agree_with_the_reference() -> None:
    reference = pytest.importorskip("unit_scaling.constraints")
    for constraint in ("gmean", "amean", "hmean", "to_output_scale", None):
        expected = reference.apply_constraint(constraint, 0.3, 1.7, 0.9)
        assert apply_constraint(constraint, 0.3, 1.7, 0.9) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("constraint", "num_factors", "message"),
    [
        (
            "geometric",
            2,
            "constraint='geometric': unknown. Expected None or one of to_output_scale",
        ),
        ("", 2, "constraint='': unknown"),
        ("to_grad_input_scale", 3, "this operation has 2 constrained gradients. Expected 1"),
        ("to_left_grad_scale", 2, "this operation has 1 constrained gradients. Expected 2"),
    ],
)
def test_bad_constraint_is_an_error(constraint: str, num_factors: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        apply_constraint(constraint, *[1.0] * num_factors)
