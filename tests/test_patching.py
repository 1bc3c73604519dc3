"""Attributes that are replaced for a while."""

import contextlib
import copy
import gc
import itertools
import math
import pickle
import threading
from typing import Any

import pytest

from lightning_unitscale.patching import _SHADOWS, Shadow, StandIn, shadowed, shadowed_here


class _Owner:
    kind = "class"

    def method(self) -> str:
        return self.kind

    @staticmethod
    def static() -> str:
        return "static"


def _on_a_thread(run: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(run()))
    thread.start(), thread.join()
    return results[0]


def test_replaced_functions_are_per_thread() -> None:
    owner = _Owner()
    functions = {"method": lambda self: f"own {self.kind}", "static": lambda: "own"}
    with shadowed_here(_Owner, **functions):
        assert (owner.method(), owner.static()) == ("own class", "own")
        assert _on_a_thread(owner.method) == "class"
        assert _on_a_thread(owner.static) == _on_a_thread(_Owner.static) == "static"
    assert (owner.method(), owner.static()) == ("class", "static")


def test_functions_of_two_threads_are_restored_in_any_order() -> None:
    owner = _Owner()
    first = shadowed_here(_Owner, method=lambda _: "first")
    second = shadowed_here(_Owner, method=lambda _: "second")
    first.__enter__()
    _on_a_thread(second.__enter__)
    assert owner.method() == "first"
    first.__exit__(None, None, None)
    # The other thread's stands over what this one has taken away.
    assert owner.method() == "class"
    second.__exit__(None, None, None)
    assert owner.method() == "class"
    assert _Owner.method.__qualname__ == "_Owner.method"


def test_original_attributes_are_restored() -> None:
    owner = _Owner()
    owner.own = 1
    with shadowed(owner, own=2, kind="instance"), shadowed(owner, kind="inner"):
        assert (owner.own, owner.kind) == (2, "inner")
    assert vars(owner) == {"own": 1}
    assert owner.kind == "class"


def test_attributes_are_restored_after_error() -> None:
    owner = _Owner()
    with pytest.raises(KeyError), shadowed(owner, kind="instance"):
        raise KeyError
    assert vars(owner) == {}


def test_removed_attribute_is_not_an_error() -> None:
    owner = _Owner()
    with shadowed(owner, kind="instance"):
        del owner.kind
    assert owner.kind == "class"


def test_classes_and_modules_can_be_patched() -> None:
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


class _Named:
    """An object whose method returns its callers, innermost first."""

    def method(self) -> list[str]:
        return []


class _Calling(StandIn):
    def __init__(self, method: Any, name: str) -> None:
        super().__init__(method)
        self.name = name

    def call(self) -> list[str]:
        return [*self._method(), self.name]


def _put(owner: Any, name: str) -> Shadow:
    return Shadow(owner, "method", _Calling(owner.method, name))


@pytest.mark.parametrize("order", [*itertools.permutations("abc")])
@pytest.mark.parametrize("has_own", [False, True])
def test_shadows_are_removed_in_any_order(order: tuple[str, ...], has_own: bool) -> None:
    owner = _Named()
    if has_own:
        owner.method = lambda: ["own"]  # type: ignore[method-assign]
    before = dict(vars(owner))
    shadows = {name: _put(owner, name) for name in "abc"}
    left = list("abc")
    for name in order:
        assert owner.method() == ["own"] * has_own + left
        assert owner.method.__wrapped__ is not None
        shadows[name].remove()
        shadows[name].remove()
        left.remove(name)
    assert vars(owner) == before
    assert not any(key[0] == id(owner) for key in _SHADOWS)


def test_shadow_added_after_removal_of_first() -> None:
    owner = _Named()
    first, second = _put(owner, "first"), _put(owner, "second")
    first.remove()
    third = _put(owner, "third")
    assert owner.method() == ["second", "third"]
    second.remove()
    assert owner.method() == ["third"]
    third.remove()
    assert vars(owner) == {}


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_equal_values_are_removed_in_any_order(order: tuple[int, ...]) -> None:
    """The value over an attribute may be the same object as the one below."""
    owner = _Owner()
    shadows = [Shadow(owner, "kind", value) for value in (True, True, None)]
    for index in order:
        assert "kind" in vars(owner)
        shadows[index].remove()
    assert vars(owner) == {}


@pytest.mark.parametrize("first_goes", [False, True])
def test_later_wrapper_of_other_code_is_kept(first_goes: bool) -> None:
    owner = _Named()
    first = _put(owner, "first")
    ours = owner.method
    owner.method = lambda: [*ours(), "theirs"]  # type: ignore[method-assign]
    theirs = owner.method
    second = _put(owner, "second")
    assert owner.method() == ["first", "theirs", "second"]
    for shadow in (first, second) if first_goes else (second, first):
        shadow.remove()
    # It holds what stood in, which only calls the method now.
    assert owner.method is theirs and owner.method() == ["theirs"]
    owner.method = ours  # type: ignore[method-assign]
    assert owner.method() == []


def test_attribute_set_by_other_code_is_kept() -> None:
    owner = _Owner()
    owner.own = 1
    with shadowed(owner, own=2):
        owner.own = 3
    with shadowed(owner, own=4):
        del owner.own
    assert vars(owner) == {}


def test_contexts_exit_in_any_order() -> None:
    for order in itertools.permutations(range(3)):
        owner = _Named()
        stacks = [contextlib.ExitStack() for _ in range(3)]
        for name, stack in zip("abc", stacks, strict=True):
            stack.enter_context(shadowed(owner, method=_Calling(owner.method, name)))
        for index in order:
            stacks[index].close()
        assert vars(owner) == {}


def test_copies_between_removals_are_unpatched() -> None:
    owner = _Named()
    first, _second = _put(owner, "first"), _put(owner, "second")
    first.remove()
    for made in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        assert made.method() == [] and made.method.__self__ is made


def test_shadows_are_freed_with_their_owner() -> None:
    owner = _Named()
    context = shadowed(owner, method=_Calling(owner.method, "ours"))
    context.__enter__()
    key, abandoned = id(owner), _put(owner, "abandoned")
    assert len(_SHADOWS[key, "method"]) == 2
    del owner, context, abandoned
    gc.collect()
    assert (key, "method") not in _SHADOWS


def test_concurrent_patching_in_threads() -> None:
    owner, start = _Named(), threading.Barrier(4)

    def put_and_remove(name: str) -> None:
        start.wait()
        for _ in range(200):
            with shadowed(owner, method=_Calling(owner.method, name)):
                owner.method()

    threads = [threading.Thread(target=put_and_remove, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert vars(owner) == {} and owner.method() == []


def test_shadow_without_python_caller() -> None:
    """In an accelerator's backward pass, the thread has no calling Python frame."""

    class Copied(_Calling):
        def call(self) -> Any:
            return self.called_by(None)

    owner = _Named()
    with shadowed(owner, method=Copied(owner.method, "ours")):
        assert owner.method() is owner.method
