"""Every code block of README, docs/guide and docs/reference is tested; this file knows all ways.

- `sh`: tests/docs/test_commands.py and test_readme.py run the commands. A command that can't run
  here is parsed: by the parser of the command line, with the dims and options of its model.
- `python`: a whole program, which tests/docs/test_readme.py runs.
- `py`: a part of a program, which tests/docs/test_py_blocks.py runs.
- `text`: an output, which tests/docs/test_commands.py compares.
- `toml`, `yaml`: read here by what reads these files.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import docs_models
import pytest
import test_commands
import yaml
from docs_blocks import BLOCKS, CONTAINER, NOT_RUN, RUN, SHOWN, Block
from docs_runner import check_shown
from readme_commands import ROOT, SNIPPETS, run_make

from pipeline.commands.parser import command_parser, read_arguments
from pipeline.commands.source_options import config_fields
from pipeline.machine.offered import PASSES, PLUGINS, offered_file
from pipeline.machine.target import TARGETS
from pipeline.models import MODELS
from pipeline.plugins.loading import find_plugins
from pipeline.source.zoo import find_spec
from pipeline.spec.config import Config
from pipeline.spec.profiles import Profile, parse_sizes
from pipeline.spec.text import parse_dims, parse_inputs, split_dims

LANGUAGES = {"sh", "py", "python", "text", "toml", "yaml"}
PAGES = {page for pages in RUN.values() for page in pages}
# what pages call the artifacts of raft
OF_RAFT = {"raft86", "raft-rtx", "artifacts/raft", "artifacts/raft_small"}


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def commands() -> list[tuple[str, str]]:
    return [(block.page, command) for block in of("sh") for command in block.commands]


def test_every_block_names_a_language_that_is_tested() -> None:
    assert [str(block) for block in BLOCKS if block.language not in LANGUAGES] == []


def test_every_command_is_run_or_has_a_reason() -> None:
    """The tests in `RUN` run all commands of their pages that are not in `NOT_RUN`."""
    assert [each for each in commands() if each[0] not in PAGES and each[1] not in NOT_RUN] == []
    assert all(callable(getattr(test_commands, name)) for name in RUN)
    assert NOT_RUN.keys() - {command for _, command in commands()} == set()


def test_every_output_is_compared() -> None:
    for block in of("text"):
        above = [b for b in of("sh") if b.page == block.page and b.line < block.line]
        ran = [command for b in above for command in b.commands if command not in NOT_RUN]
        assert block.text.startswith(SHOWN) or (block.page in PAGES and ran), str(block)
    for first in SHOWN:
        assert any(block.text.startswith(first) for block in of("text")), first


@pytest.mark.parametrize("printed", ["one two\nthree", "one 2 four\nthree 3.5 s more", ""])
def test_an_output_that_differs_is_noticed(printed: str) -> None:
    block = Block("a page", 1, "text", "one ... two\nthree 3.1 s\n")
    check_shown(block, "first\none and a two\nbetween\n  three 12.5 s\nlast")
    with pytest.raises(AssertionError, match="not printed"):
        check_shown(block, printed)


def test_every_program_is_run() -> None:
    assert [block.text for block in of("python")] == SNIPPETS


@pytest.mark.parametrize("command", [c for c in NOT_RUN if c.startswith("pipeline ")])
def test_a_command_that_is_not_run_can_be_parsed(command: str) -> None:
    check_command(shlex.split(command.split(" | ", maxsplit=1)[0])[1:])


def check_command(words: Sequence[str]) -> None:
    """Parses a command line, and reads its sizes with the dims of its model."""
    parsed = command_parser().parse_args(words)
    if getattr(parsed, "model", None) is not None:
        check_source(parsed)
    elif str(getattr(parsed, "artifact", "")) in OF_RAFT:
        dims = find_spec("raft", {}).interface.dims
        shapes = getattr(parsed, "shape", None) or []
        for text in [shapes] if isinstance(shapes, str) else shapes:
            parse_sizes(text, dims)


def check_source(parsed: argparse.Namespace) -> None:
    """Reads the options of `convert`, `export` or `check`."""
    given = config_fields(parsed)
    Config(**given, target=parsed.target)
    if parsed.model in MODELS:
        weights = Path(parsed.weights) if parsed.weights else None
        if weights is None or weights.exists():
            dims = find_spec(parsed.model, given["options"]).interface.dims
            for number, text in enumerate(parsed.profile):
                Profile.parse(text, str(number)).resolve(dims)
    elif not parsed.model.endswith(".onnx"):
        ranges, _ = split_dims(given["dims"])
        parse_inputs(given["inputs"], parse_dims(ranges))
    names = [name for name in parsed.plugin if not name.endswith(".so")]
    assert len(find_plugins(names, TARGETS[parsed.target])) == len(names)


@pytest.mark.parametrize("command", [c for c in NOT_RUN if not c.startswith("pipeline ")])
def test_the_parts_of_another_command_are_there(command: str) -> None:
    subprocess.run(["sh", "-n", "-c", command], check=True)
    words = shlex.split(command)
    if words[0] == "make":
        done = run_make("--dry-run", *words[1:])
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            if " -m pipeline " in line:
                check_command(shlex.split(line.partition(" -m pipeline ")[2]))
    if "pip" in words:
        extras = re.search(r"\[project.optional-dependencies\](.*?)\n\[", project(), re.DOTALL)
        assert extras is not None
        for word in words:
            for name in word[2:-1].split(",") if word.startswith(".[") else []:
                assert re.search(rf"^{name} = ", extras[1], re.MULTILINE), name
        if "-c" in words:
            assert (ROOT / words[words.index("-c") + 1]).is_file()
        for pin in (word for word in words if word.startswith("tensorrt-rtx==")):
            assert pin in (ROOT / "constraints.txt").read_text().splitlines()
    if "pytest" in words:
        assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    if NOT_RUN[command] == CONTAINER:
        image = (ROOT / "Containerfile").read_text()
        assert 'ENTRYPOINT ["pipeline"]' in image and "WORKDIR /work" in image
        if words[1] == "run":
            check_command(words[words.index("pipeline") + 1 :])


def project() -> str:
    return (ROOT / "pyproject.toml").read_text()


def test_the_options_in_a_file_can_be_read(tmp_path: Path, monkeypatch: Any) -> None:
    (block,) = (b for b in of("toml") if b.page == "docs/guide/own-model.md")
    (tmp_path / "pipeline.toml").write_text(block.text)
    monkeypatch.chdir(tmp_path)
    for command in ("convert", "export", "check"):
        parsed = read_arguments([command, "my_model"])
        check_source(parsed)
        assert parsed.model == "my_model.py:factory" and parsed.precision == "fp16"
    assert read_arguments(["convert", "my_model"]).quick


def test_the_entry_points_of_a_package_are_found(tmp_path: Path, monkeypatch: Any) -> None:
    (block,) = (b for b in of("toml") if b.page == "docs/guide/plugins.md")
    info, package = tmp_path / "my_package-1.0.dist-info", tmp_path / "my_package"
    info.mkdir()
    package.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    text = block.text.replace('[project.entry-points."', "[").replace('"]', "]").replace('"', "")
    (info / "entry_points.txt").write_text(text)
    (package / "__init__.py").write_text("LIBRARY = __file__")
    (package / "my_pass.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_package", raising=False)
    assert offered_file(PASSES, "my_pass") == package / "my_pass.py"
    assert offered_file(PLUGINS, "my_op") == package / "__init__.py"


def test_the_workflow_passes_inputs_of_the_action() -> None:
    (block,) = of("yaml")
    (step,) = yaml.safe_load(block.text)
    assert step.keys() == {"uses", "with"}
    assert step["with"].keys() <= yaml.safe_load((ROOT / "action.yml").read_text())["inputs"].keys()
    for line in step["with"]["check"].splitlines():
        check_command(["check", *shlex.split(line)])
    for line in step["with"]["against"].splitlines():
        new, old = shlex.split(line)
        check_command(["verify", new, "--against", old])


def test_the_blocks_of_other_kinds_are_read_above() -> None:
    pages = [block.page for block in of("toml")]
    assert pages == ["docs/guide/own-model.md", "docs/guide/plugins.md"]


@pytest.mark.parametrize("name", docs_models.ZOO)
def test_a_stand_in_has_the_inputs_and_outputs_of_its_model(name: str) -> None:
    real, small = find_spec(name, {}), getattr(docs_models, name)()
    for tensors in ("inputs", "outputs"):
        first, second = (
            [(each.name, [str(size).partition(" in ")[0] for size in each.shape])
             for each in getattr(spec, tensors)]
            for spec in (real, small)
        )  # fmt: skip
        assert first == second
