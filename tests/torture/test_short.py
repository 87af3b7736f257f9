"""A short form of the campaign, and proof that it notices faults.

Everything runs in processes of its own: a fork of a process that has used torch's threads hangs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

HERE = Path(__file__).parent
PREPARED = f"""
import json, os, signal, sys, time
from pathlib import Path
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent / "support")!r}]
import campaign, modules, mutations, operators
modules.prepare()
"""


def printed(code: str) -> Any:
    """What the last line of a script prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", f"{PREPARED}{code}"], capture_output=True, text=True, check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("part", "cases"), [("mutations", 40), ("modules", 4), ("operators", 2)])
def test_a_short_campaign(part: str, cases: int, tmp_path: Path) -> None:
    words = ["--only", part, "--cases", str(cases), "--seed", "3", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(HERE / "campaign.py"), *words, "--minutes", "4"],
        capture_output=True, text=True, check=False, timeout=420,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((tmp_path / "torture.json").read_text())
    assert sum(facts["counts"].values()) == cases
    assert facts["not held"] == []
    assert f"| {part} | " in done.stdout


def test_wrong_models_are_noticed(tmp_path: Path) -> None:
    """A model that remembers, with the checks switched off; and an operator that is wrong."""
    (tmp_path / "a").mkdir()
    found = printed(f"""
import pipeline.compare.runners, pipeline.export.export, pipeline.export.trace
for place in (pipeline.export.export, pipeline.export.trace):
    place.kept_values = lambda *_: []
pipeline.compare.runners._close = lambda *_: True
hostile = next(h for h in modules.every() if h.kind.startswith("counts in attribute"))
remembers = modules.converted(hostile, Path({str(tmp_path / "a")!r}))
same, operators._same = operators._same, lambda got, want: want.shape[-1] != 40
operator = operators.compared(operators.ZOO[0], Path({str(tmp_path / "b")!r}), 300, 0)
print(json.dumps([remembers, operator[0]]))
""")
    assert found[0].startswith("wrong: a later call")
    assert found[1].startswith("wrong: at")


def test_faults_of_a_command_are_noticed(tmp_path: Path) -> None:
    found = printed(f"""
import pipeline.commands.main as command
base = mutations.Base.make(Path({str(tmp_path)!r}))
mutations.LIMIT = 3.0
faults = {{
    "wrote outside": lambda words: Path("outside/new").touch() or 2,
    "ran code": lambda words: Path("RAN").touch() or 2,
    "a traceback": lambda words: print("Traceback (most recent call last)") or 1,
    "an escape character": lambda words: print(chr(27)) or 1,
    "exit code 3": lambda words: 3,
    "ZeroDivisionError": lambda words: 1 / 0,
    "SIGSEGV": lambda words: os.kill(os.getpid(), signal.SIGSEGV),
    "hang": lambda words: time.sleep(60),
    "accepted": lambda words: 0,
    "": lambda words: 2,
}}
results = {{}}
for problem, command.main in faults.items():
    case = mutations.Mutation("model.onnx", "flip", 0.5, 1, 0, rehash=False)
    result = mutations.verdict(base, case)
    results[problem] = [result["text"], campaign.held(result)]
print(json.dumps(results))
""")
    assert found.pop("") == ["", True]
    assert len(found) == 9
    for problem, (text, held) in found.items():
        assert problem in text
        assert not held


def test_the_same_seed_makes_the_same_cases() -> None:
    found = printed("""
def some(number):
    cases = campaign.generated(mutations.mutations(), lambda case: {"what": repr(case)}, number)
    return [next(cases)["what"] for _ in range(150)]
print(json.dumps([some(1), some(1), some(2)]))
""")
    assert found[0] == found[1] != found[2]
    assert len(set(found[0])) == 150


def test_the_table_counts() -> None:
    text = printed("""
results = [
    {"part": "kills", "what": "SIGINT in export", "verdict": "exit 130", "seconds": 1.0},
    {"part": "kills", "what": "too late", "verdict": "exit 0", "seconds": 0.1},
    {"part": "operators", "what": "conv", "verdict": "wrong", "sets": 7, "seconds": 3.0},
]
print(json.dumps(campaign.table(results, 5.0, 1)))
""")
    assert "| kills | 1 effective of 2 | 1 exit 130, 1 exit 0 | 0 | 1.0 s |" in text
    assert "| operators | 1 operators, 7 sets of sizes | 1 wrong | 1 | 3.0 s |" in text
