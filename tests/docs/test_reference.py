"""All public names are in the reference."""

import re
from pathlib import Path

import lightning_unitscale
from lightning_unitscale import callbacks, functional, pipeline, profiler, remat, transforms

REFERENCE = Path(__file__).parents[2] / "docs/reference"


def test_every_public_name_has_reference_entry() -> None:
    pages = "\n".join(page.read_text() for page in REFERENCE.glob("*.md"))
    entries = set(re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE))
    names = {*lightning_unitscale.__all__, *callbacks.__all__} - {"__version__"}
    assert names <= {entry.rpartition(".")[2] for entry in entries}
    # Of these everything that is public is shown.
    assert {module.__name__ for module in (functional, pipeline, profiler, remat, transforms)} <= (
        entries
    )


def test_operations_made_from_their_rules_are_listed() -> None:
    page = (REFERENCE / "functional.md").read_text()
    made = functional.relu.__module__
    operations = {
        name
        for name, value in vars(functional).items()
        if getattr(value, "__module__", None) == made and not name.startswith("_")
    }
    assert len(operations) > 50
    assert operations == {name for name in re.findall(r"`(\w+)`", page) if name in operations}
