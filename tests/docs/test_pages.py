"""The code blocks of the README, of CONTRIBUTING and of the pages run, page by page.

Python blocks share the names of their page. A YAML block is `run.yaml`, with which the commands of
`sh` blocks run. Where a page says `my_project`, it is the one beside this file.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_unitscale import ScaleMonitor
from lightning_unitscale.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Lightning starts a process for each device, with the file that it was started with.
STARTS_PROCESSES = ROOT / "docs/how-to/several-devices.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_COMMAND = "lightning-unitscale "


def blocks(page: Path) -> list[tuple[str, str]]:
    """The code blocks of a page that run, each with its language."""
    found = _BLOCK.findall(page.read_text())
    return [(language, text) for language, text in found if language in {"python", "sh", "yaml"}]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _pages() -> Iterator[Any]:
    for page in filter(blocks, PAGES):
        marks = [pytest.mark.distributed, pytest.mark.slow] if page == STARTS_PROCESSES else []
        yield pytest.param(page, marks=marks)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the module of `my_project`, and Trainers that take eight steps on the CPU."""
    shutil.copy(Path(__file__).with_name("my_project.py"), tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PL_TRAINER_ACCELERATOR", "cpu")
    monkeypatch.setenv("PL_TRAINER_MAX_EPOCHS", "2")
    yield
    sys.modules.pop("my_project", None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning and torch have much to say to a user
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("page", list(_pages()), ids=_name)
def test_code_of_page_runs(page: Path, tmp_path: Path) -> None:
    from my_project import MyData, MyModule

    names = {"MyData": MyData, "MyModule": MyModule, "model": MyModule(), "datamodule": MyData()}
    if page == STARTS_PROCESSES:
        code = "".join(text for language, text in blocks(page) if language == "python")
        (tmp_path / "train.py").write_text(code)
        run = subprocess.run(
            [sys.executable, "train.py"], capture_output=True, text=True, timeout=200
        )
        assert run.returncode == 0, run.stderr[-3000:]
    for language, text in blocks(page):
        if language == "yaml":
            (tmp_path / "run.yaml").write_text(text)
        elif language == "sh":
            for line in text.splitlines():
                if line.startswith(_COMMAND):
                    main(shlex.split(line, comments=True)[1:])
        elif page != STARTS_PROCESSES:
            exec(compile(text, _name(page), "exec"), names)


@pytest.mark.usefixtures("project")
@pytest.mark.filterwarnings("ignore")
def test_example_pass_runs_before_monitor() -> None:
    from my_project import MyData, MyModule

    names: dict[str, Any] = {"model": MyModule()}
    for language, text in blocks(ROOT / "CONTRIBUTING.md"):
        if language == "python":
            exec(text, names)
    callback, monitor = names["GelusToSilusCallback"](), ScaleMonitor(every_n_steps=1)
    trainer = pl.Trainer(max_steps=1, logger=False, callbacks=[callback, monitor])
    trainer.fit(MyModule(), MyData())
    assert "4 gelus made silus" in callback.explanation
    names["module"](torch.ones(2, 16))
    assert "4 gelus made silus" in names["module"].explain()
    assert "layers.2.gelu" in monitor.snapshots[-1].names  # measured in the same graph
