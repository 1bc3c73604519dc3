"""Attributes that stand in front of others for a while."""

import math

import pytest

from lightning_unitscale.patching import shadowed


class _Owner:
    kind = "class"


def test_what_was_there_is_back() -> None:
    owner = _Owner()
    owner.own = 1
    with shadowed(owner, own=2, kind="instance"), shadowed(owner, kind="inner"):
        assert (owner.own, owner.kind) == (2, "inner")
    assert vars(owner) == {"own": 1}
    assert owner.kind == "class"


def test_after_an_error_as_well() -> None:
    owner = _Owner()
    with pytest.raises(KeyError), shadowed(owner, kind="instance"):
        raise KeyError
    assert vars(owner) == {}


def test_somebody_may_have_removed_it() -> None:
    owner = _Owner()
    with shadowed(owner, kind="instance"):
        del owner.kind
    assert owner.kind == "class"


def test_a_class_and_a_python_module() -> None:
    class Derived(_Owner):
        def own(self) -> int:
            return 1

    own = vars(Derived)["own"]
    with shadowed(Derived, own=lambda _: 2, kind="shadow"):
        assert (Derived().own(), Derived.kind) == (2, "shadow")
    assert vars(Derived)["own"] is own
    assert "kind" not in vars(Derived) and Derived.kind == "class"
    with shadowed(math, pi=3):
        assert math.pi == 3
    assert math.pi > 3
