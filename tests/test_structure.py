"""Check the limits of sizes. ``python -m tests.structure`` lists the files that exceed them."""

from pathlib import Path

from tests.structure import (
    MAX_FUNCTION_LINES,
    MAX_METHODS,
    PACKAGE,
    files,
    folders,
    large_classes,
    long_functions,
    loose_files,
    repeated_names,
)

MAX_FOLDERS = 15
MAX_LOOSE_FILES = 8
MAX_FILE_LINES = 400
MAX_LARGE_CLASSES = 5
# Triton compiles a kernel as one function.
KERNELS = "scales/triton_kernels.py"


def test_folders_and_file_lengths_are_limited() -> None:
    assert len(folders()) <= MAX_FOLDERS
    assert len(loose_files()) <= MAX_LOOSE_FILES
    assert not [path for path in files() if len(path.read_text().splitlines()) >= MAX_FILE_LINES]


def test_file_names_are_unique() -> None:
    assert not repeated_names()


def test_function_lengths_are_limited() -> None:
    assert not [name for name in long_functions() if not name.startswith(KERNELS)]


def test_number_of_large_classes_is_limited() -> None:
    assert len(large_classes()) <= MAX_LARGE_CLASSES


def test_structure_checks_detect_violations(tmp_path: Path) -> None:
    lines = [
        "class Large:",
        *(f"    def method_{number}(self): ..." for number in range(MAX_METHODS + 1)),
        "class Small:",
        *(f"    def method_{number}(self): ..." for number in range(MAX_METHODS)),
        "def long():",
        *["    pass"] * MAX_FUNCTION_LINES,
        "def short():",
        '    """Return nothing."""',
        *["    pass"] * MAX_FUNCTION_LINES,
    ]
    for folder in ("scales", "rules"):
        (tmp_path / PACKAGE / folder).mkdir(parents=True)
        (tmp_path / PACKAGE / folder / "same.py").write_text("")
        (tmp_path / PACKAGE / folder / "__init__.py").write_text("")
    (tmp_path / PACKAGE / "scales" / "other.py").write_text("\n".join(lines))
    assert {folder.name for folder in folders(tmp_path)} == {"scales", "rules"}
    assert repeated_names(tmp_path) == {"same.py": 2}
    assert large_classes(tmp_path) == {"scales/other.py:Large": MAX_METHODS + 1}
    assert long_functions(tmp_path) == {"scales/other.py:long": MAX_FUNCTION_LINES + 1}
