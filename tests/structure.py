"""Measure the package: folders, files, lines, import circles, large classes and long functions.

``python -m tests.structure`` prints a table, and ``--json`` the same figures for a comparison.
"""

import ast
import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx
from tabulate import tabulate

PACKAGE = "lightning_unitscale"
ROOT = Path(__file__).parents[1]
MAX_METHODS = 15
MAX_FUNCTION_LINES = 60


@cache
def parsed(text: str) -> ast.Module:
    """Return the tree of a file's text."""
    return ast.parse(text)


def files(root: Path = ROOT) -> list[Path]:
    """Return every Python file of the package."""
    return sorted((root / PACKAGE).rglob("*.py"))


def name_of(path: Path, root: Path = ROOT) -> str:
    """Return a file's path within the package, such as ``scales/layout.py``."""
    return path.relative_to(root / PACKAGE).as_posix()


def imports(path: Path, root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of every import, also of nested ones."""
    package = [PACKAGE, *path.relative_to(root / PACKAGE).parent.parts]
    for node in ast.walk(parsed(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*parents, *filter(None, [node.module])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def file_of(dotted: str, root: Path = ROOT) -> str | None:
    """Return the file of this package that defines a dotted name; None for other packages."""
    parts = dotted.split(".")
    if parts[0] != PACKAGE:
        return None
    for end in range(len(parts), 0, -1):
        path = root.joinpath(*parts[:end])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.exists():
                return name_of(candidate, root)
    raise AssertionError(f"{dotted} is imported, but no file defines it")


def circles(root: Path = ROOT) -> list[list[str]]:
    """Return the sets of files that import each other, directly or indirectly."""
    graph = networkx.DiGraph()
    for path in files(root):
        for _, dotted in imports(path, root):
            imported = file_of(dotted, root)
            # The package's __init__.py imports its folders lazily.
            if imported not in (None, "__init__.py", name_of(path, root)):
                graph.add_edge(name_of(path, root), imported)
    components = networkx.strongly_connected_components(graph)
    return sorted(sorted(files) for files in components if len(files) > 1)


def large_classes(root: Path = ROOT) -> dict[str, int]:
    """Return the classes with more than `MAX_METHODS` methods, and the number of methods."""
    found = {}
    for path in files(root):
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(item, ast.FunctionDef) for item in node.body)
                if methods > MAX_METHODS:
                    found[f"{name_of(path, root)}:{node.name}"] = methods
    return found


def long_functions(root: Path = ROOT) -> dict[str, int]:
    """Return the functions with more than `MAX_FUNCTION_LINES`, docstrings excluded."""
    found = {}
    for path in files(root):
        for node in ast.walk(parsed(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node
                lines = (node.end_lineno or 0) - first.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found[f"{name_of(path, root)}:{node.name}"] = lines
    return found


def repeated_names(root: Path = ROOT) -> dict[str, int]:
    """Return the file names that occur more than once, except ``__init__.py``."""
    counts = Counter(path.name for path in files(root) if path.name != "__init__.py")
    return {name: count for name, count in counts.items() if count > 1}


def folders(root: Path = ROOT) -> set[Path]:
    """Return the folders of the package that contain files."""
    return {path.parent for path in files(root)} - {root / PACKAGE}


def loose_files(root: Path = ROOT) -> list[Path]:
    """Return the modules outside of folders."""
    return [path for path in files(root) if path.parent == root / PACKAGE and path.stem[0] != "_"]


def figures(root: Path = ROOT) -> dict[str, int]:
    """Return the package's figures by name."""
    lines = [len(path.read_text().splitlines()) for path in files(root)]
    return {
        "folders": len(folders(root)),
        "files outside of folders": len(loose_files(root)),
        "files": len(lines),
        "lines": sum(lines),
        "lines of the longest file": max(lines),
        "import circles": len(circles(root)),
        f"classes of more than {MAX_METHODS} methods": len(large_classes(root)),
        f"functions of more than {MAX_FUNCTION_LINES} lines": len(long_functions(root)),
        "file names that occur twice": len(repeated_names(root)),
    }


if __name__ == "__main__":
    tree = next((Path(word) for word in sys.argv[1:] if not word.startswith("-")), ROOT)
    measured = figures(tree)
    if "--json" in sys.argv:
        print(json.dumps(measured, indent=2))
    else:
        print(tabulate(measured.items()))
        for title, found in (
            ("circles", circles(tree)),
            ("classes", large_classes(tree)),
            ("functions", long_functions(tree)),
            ("names", repeated_names(tree)),
        ):
            print(f"\n{title}: {json.dumps(found, indent=1)}")
