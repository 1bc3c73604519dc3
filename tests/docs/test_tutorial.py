"""The tutorial's notebook runs. As a script, this writes into it what its code prints."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs/tutorial.ipynb"


def executed(folder: str | Path) -> Any:
    """The notebook after a run in ``folder``; an error in a cell is raised."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    return nbclient.NotebookClient(notebook, resources=resources).execute()


@pytest.mark.slow
def test_tutorial_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = executed(tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    results = [output.data["text/plain"] for output in outputs if "data" in output]
    assert float(results[0]) < 1  # it learns
    assert results[1:] == ["True"]  # and to the same loss with the callbacks
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "23 of 23 matmuls scaled" in printed
    assert "FP8     constant scales" in printed
    assert list(tmp_path.glob("logs/unit_scaled/version_0/events*"))  # for the Scales tab


def write() -> None:
    """Run the notebook and store its output, without warnings."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(folder)
    for cell in notebook.cells:
        cell.metadata = {}
        if "outputs" in cell:
            cell.execution_count = None
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                output.pop("execution_count", None)
                if output.output_type == "execute_result":
                    output.output_type = "display_data"
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    import nbformat

    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(NOTEBOOK.parents[1]))
    write()
