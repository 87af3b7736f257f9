"""Running users' files: their traces in the process, and the line that an error names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pipeline.machine.python_file import line_of_error, run_python_file


def test_the_module_can_be_found_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "@dataclass\nclass Size:\n    h: int\n"
    )
    module = run_python_file(file, "a_file_of_this_test")
    assert sys.modules.pop("a_file_of_this_test") is module
    assert module.Size(3).h == 3


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("x = 1\n1 / 0\n", "line 2"),
        ("x = 1\ny = (\n", "line 2"),
        ("def f():\n    raise SystemExit\nf()\n", "line 2"),
        ("import json\njson.loads('{')\n", "line 2"),  # raised in another file, at a deeper level
    ],
)
def test_an_error_has_the_line_and_leaves_no_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("mine.py")
    file.write_text(text)
    with pytest.raises((Exception, SystemExit)) as caught:
        run_python_file(file, "a_file_of_this_test")
    assert line_of_error(caught.value, file) == line
    assert "a_file_of_this_test" not in sys.modules


def test_an_error_from_elsewhere_has_no_line(tmp_path: Path) -> None:
    assert line_of_error(ValueError("other"), tmp_path / "mine.py") == "line ?"


def test_what_had_the_name_before_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "a_file_of_this_test", sys)
    file = tmp_path / "mine.py"
    file.write_text("1 / 0")
    with pytest.raises(ZeroDivisionError):
        run_python_file(file, "a_file_of_this_test")
    assert sys.modules["a_file_of_this_test"] is sys
    with pytest.raises(ImportError, match=r"end in \.py"):
        run_python_file(tmp_path / "mine.txt", "another_of_this_test")
