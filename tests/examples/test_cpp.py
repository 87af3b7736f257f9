"""The C++ example: what needs no GPU.

g++ looks for headers in its own places, and in the folders in its variable CPLUS_INCLUDE_PATH.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import SCHEMA, TargetInfo
from pipeline.artifact.stored import stored_points
from pipeline.convert.report import Report
from pipeline.errors import InputError
from pipeline.runtime.sizes import best_profile
from pipeline.spec.file_names import PLAN
from pipeline.spec.profiles import Profile

CPP = Path(__file__).resolve().parents[2] / "examples" / "cpp"
FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{CPP}")
# reads an artifact; then chooses the profile for each line of sizes
READER = """
#include "artifact.hpp"
#include <iostream>
int main(int, char** words) try {
    const auto manifest = artifact::manifest(words[1]);
    std::cout << artifact::sha256(artifact::plan(words[1], manifest)) << "\\n";
    const auto other = artifact::json::parse(artifact::read(words[2]));
    for (const auto& sizes : other.at("tries")) {
        try {
            std::cout << artifact::profile(other, sizes.get<artifact::Sizes>()) << "\\n";
        } catch (const std::runtime_error&) {
            std::cout << "none\\n";
        }
    }
} catch (const std::exception& error) {
    std::cout << "error: " << error.what() << "\\n";
    return 2;
}
"""


def compile_cpp(*words: str, source: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["g++", *FLAGS, *words], input=source, capture_output=True, text=True, timeout=300
    )


def test_the_sources_know_this_manifest() -> None:
    """This needs no compiler, so that a changed manifest is noticed everywhere."""
    source = (CPP / "artifact.hpp").read_text() + (CPP / "load.cpp").read_text()
    assert f'found.at("schema") == {SCHEMA}' in source
    read = set(re.findall(r'target\.at\("(\w+)"\)', source))
    assert read and read <= {field.name for field in dataclasses.fields(TargetInfo)}


def need(*headers: str) -> None:
    """Skips the test if the compiler or a header is missing."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed here")
    for header in headers:
        done = compile_cpp(
            "-x",
            "c++",
            "-fsyntax-only",
            "-",
            source=f"#if !__has_include(<{header}>)\n#error\n#endif",
        )
        if done.returncode:
            pytest.skip(
                f"g++ finds no {header}: install it, or add its folder to CPLUS_INCLUDE_PATH"
            )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("nlohmann/json.hpp", "openssl/evp.h")
    program = tmp_path_factory.mktemp("cpp") / "reader"
    done = compile_cpp("-x", "c++", "-", "-lcrypto", "-o", str(program), source=READER)
    assert done.returncode == 0, done.stderr
    return program


def read(reader: Path, artifact: Path, other: Path) -> list[str]:
    done = subprocess.run(
        [reader, artifact, other], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout.splitlines()


def profiles() -> list[Profile]:
    ranges: list[Mapping[str, tuple[int, int, int]]] = [
        {"b": (1, 8, 32), "s": (1, 64, 128)},
        {"b": (1, 4, 32), "s": (1, 1, 1)},
        {"b": (1, 1, 1), "s": (1, 64, 128)},
        {"b": (0, 16, 64), "s": (16, 32, 64)},
        {"b": (0, 16, 64), "s": (16, 32, 64)},
    ]
    return [Profile(f"p{n}", each) for n, each in enumerate(ranges)]


def test_it_chooses_the_profile_that_load_chooses(
    converted: Report, reader: Path, tmp_path: Path
) -> None:
    rng = random.Random(0)
    tries = [
        {"b": rng.choice([0, 1, 2, 8, 33, 64]), "s": rng.choice([1, rng.randrange(140)])}
        for _ in range(300)
    ]

    def best(sizes: Mapping[str, int]) -> str:
        try:
            return str(best_profile(profiles(), sizes))
        except InputError:
            return "none"

    content = [{"name": p.name, "ranges": p.ranges} for p in profiles()]
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"interface": {"profiles": content}, "tries": tries}))
    plan, *found = read(reader, converted.path, other)
    assert plan == converted.manifest.files[PLAN].sha256
    assert found == [best(sizes) for sizes in tries]
    assert set(found) == {"0", "1", "2", "3", "none"}


@pytest.mark.parametrize("change", ["a byte", "the end", "the schema", "no engine"])
def test_it_refuses_what_does_not_belong_together(
    converted: Report, reader: Path, tmp_path: Path, change: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(converted.path, copy)
    plan, manifest = copy / PLAN, json.loads((copy / "manifest.json").read_text())
    content = plan.read_bytes()
    if change == "a byte":
        plan.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    elif change == "the end":
        plan.write_bytes(content[:-1])
    elif change == "the schema":
        manifest["schema"] = SCHEMA - 1
    else:
        manifest["build"] = None
    (copy / "manifest.json").write_text(json.dumps(manifest))
    words = {
        "the schema": f"reads schema {SCHEMA}, it has {SCHEMA - 1}",
        "no engine": "the artifact has no engine",
    }.get(change, "engine.plan differs from its manifest")
    (line,) = read(reader, copy, tmp_path)
    assert line.startswith("error: ") and words in line


def test_the_loader_compiles(tmp_path: Path) -> None:
    need("nlohmann/json.hpp", "openssl/evp.h", "cuda_runtime_api.h", "NvInfer.h")
    done = compile_cpp("-c", str(CPP / "load.cpp"), "-o", str(tmp_path / "load.o"))
    assert done.returncode == 0, done.stderr


def test_the_cases_are_the_stored_comparison(converted: Report, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(CPP / "write_cases.py"), str(converted.path), str(tmp_path)],
        capture_output=True, text=True, timeout=200, cwd=CPP.parents[1], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    artifact = Artifact.open(converted.path)
    points = stored_points(artifact.path, artifact.manifest.reference)
    cases = json.loads((tmp_path / "cases.json").read_text())
    assert done.stdout == f"{len(points)} cases in {tmp_path}\n" and len(cases) == len(points) > 1
    for case, point in zip(cases, points, strict=True):
        shapes = {name: array.shape for name, array in point.feed.items()}
        assert case["sizes"] == artifact.manifest.interface.sizes_of(shapes)
        for kind, arrays in (("inputs", point.feed), ("outputs", point.outputs)):
            assert [tensor["name"] for tensor in case[kind]] == list(arrays)
            for tensor in case[kind]:
                value = np.fromfile(tmp_path / tensor["file"], tensor["dtype"])
                want = arrays[tensor["name"]]
                np.testing.assert_array_equal(value.reshape(tensor["shape"]), want)
        tolerances = artifact.manifest.engine_tolerances()
        assert all(t["rtol"] == tolerances[t["name"]].rtol for t in case["outputs"])


def test_an_artifact_that_is_missing_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(CPP / "write_cases.py"), str(tmp_path / "none"), str(tmp_path)],
        capture_output=True, text=True, timeout=200, cwd=CPP.parents[1], check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
