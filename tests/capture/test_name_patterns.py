"""Globs of tensors and modules, and errors for those that match nothing."""

from __future__ import annotations

import pytest

from lightning_unitscale.capture.name_patterns import NamePatterns

TENSORS = [("blocks.0.attn.query.linear", "blocks.0.attn.query"), ("head.linear", "head")]


def patterns(**options: object) -> NamePatterns:
    given = NamePatterns(**options)  # type: ignore[arg-type]
    for names in TENSORS:
        given.match_names(*names)
    return given


def test_matching_globs_are_not_reported() -> None:
    given = patterns(include=["blocks.*", "head"], exclude=["*.query"])
    assert given.take_unmatched() == []
    assert not given.match_names(*TENSORS[0]) and given.match_names(*TENSORS[1])


@pytest.mark.parametrize(
    ("glob", "meant"),
    [
        ("blocks.0", "blocks.0.*"),  # a module, where tensors of those inside are asked for
        ("attn.query", "*.attn.query"),  # without what is before it
        ("attn", "*attn*"),
        ("haed", "head"),
        ("haed.*", "head"),
    ],
)
@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_unmatched_glob_is_reported_once(argument: str, glob: str, meant: str) -> None:
    given = patterns(**{argument: [glob, "head"]})
    (text,) = given.take_unmatched()
    assert text.startswith(f"{argument}={glob!r}: matches nothing. Expected ")
    assert f", such as {meant!r}. " in text
    assert given.take_unmatched() == []


def test_no_suggestion_without_names() -> None:
    (text,) = NamePatterns(exclude="head").take_unmatched()
    assert "such as" not in text
