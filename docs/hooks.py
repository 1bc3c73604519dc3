"""What `mkdocs` does not do by itself: the notebook as a page, and roles in docstrings as code."""

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

NOTEBOOK, NOTEBOOK_PAGE = "tutorial.ipynb", "tutorial.md"
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>|`)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the tutorial's page, which is the notebook and has no second copy of its text."""
    notebook = json.loads((Path(config.docs_dir) / NOTEBOOK).read_text())
    files.append(File.generated(config, NOTEBOOK_PAGE, content=as_markdown(notebook)))
    return files


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Links to the notebook lead to its page, but for the page's own, which has the file."""
    is_notebook = page.file.src_uri == NOTEBOOK_PAGE
    return markdown if is_notebook else markdown.replace(f"({NOTEBOOK})", f"({NOTEBOOK_PAGE})")


def on_page_content(html: str, **kwargs: Any) -> str:
    """Takes the roles off names such as :func:`simulate` of a docstring, which are code then."""
    return _ROLE.sub("", html)


def as_markdown(notebook: dict[str, Any]) -> str:
    """The cells of a notebook, and what its code printed, one after the other."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            text = output.get("text") or output.get("data", {}).get("text/plain", "")
            parts.append(f"```text\n{''.join(text).rstrip()}\n```")
    return "\n\n".join(parts)
