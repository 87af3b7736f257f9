"""Attacks the pipeline for as long as it is told, and counts the faults.

    python tests/torture/campaign.py [--minutes 60] [--seed 0] [--only PART] [--cases N]
        [--out DIR] [--write]

Parts: ``kills`` (signals at random moments of a conversion), ``mutations`` (damaged and forged
files), ``modules`` (models written to slip through) and ``operators`` (operators at random sizes).
Two processes share the minutes: one sends signals only, the other does each part in turn. The same
seed makes the same cases, as far as the time goes.

Prints a table, and writes DIR/torture.json (default: bench-results) with the counts and, for each
case that did not hold, what repeats it. --write also puts the table into docs/results/torture.md.
Exits with 1 if a case did not hold.
"""

from __future__ import annotations

import argparse
import collections
import json
import logging
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]

Result = dict[str, Any]
PARTS = ("kills", "mutations", "modules", "operators")
# the parts of each process, with their shares of the time
LANES: Sequence[Mapping[str, float]] = (
    {"mutations": 0.3, "modules": 0.35, "operators": 0.11, "kills": 0.24},
    {"kills": 1.0},
)
DOCS = Path(__file__).resolve().parents[2] / "docs" / "results" / "torture.md"
_APART = 10**6  # between the seeds of the processes
BEGIN, END = "<!-- torture: begin -->", "<!-- torture: end -->"


def generated(
    strategy: st.SearchStrategy[Any],
    check: Callable[[Any], Result | None],
    number: int,
    most: int = 10**6,
) -> Iterator[Result]:
    """The results of generated cases, each once. New batches follow until the caller stops."""
    seen: set[str] = set()
    for batch in range(most):
        cases: list[Any] = []

        @seed(number + 1000 * batch)
        @settings(
            max_examples=100, deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(strategy)
        def collect(case: Any) -> None:
            cases.append(case)  # noqa: B023 - called in this round

        collect()
        for case in cases:
            if repr(case) in seen:
                continue
            seen.add(repr(case))
            result = check(case)
            if result is not None:
                yield result


def kills(number: int, folder: Path) -> Iterator[Result]:
    import dataclasses

    from helpers import let_children_heed_signals
    from kills import campaign

    let_children_heed_signals()
    for kill in campaign(folder, 10**6, number):
        found = dataclasses.asdict(kill)
        yield {
            "what": f"{kill.number} in {kill.stage}" if kill.effective else "too late",
            "verdict": "failed" if kill.problems else f"exit {kill.code}",
            "text": "; ".join(kill.problems),
            "seconds": kill.seconds,
            "again": f"kills.py, seed {number}: {found}",
        }


def mutations(number: int, folder: Path) -> Iterator[Result]:
    import modules
    import mutations as part

    modules.prepare()
    base = part.Base.make(folder / "base")
    yield from generated(part.mutations(), lambda case: part.verdict(base, case), number)


def modules(number: int, folder: Path) -> Iterator[Result]:
    import modules as part

    del folder
    part.prepare()
    yield from generated(part.strategy(), part.verdict, number)


def operators(number: int, folder: Path) -> Iterator[Result]:
    import modules as part
    import operators as ops

    del folder
    part.prepare()
    for turn in range(10**6):
        for pattern in ops.ZOO:
            yield ops.verdict(pattern, 180, number + turn)


def held(result: Result) -> bool:
    """True unless a case shows a fault: a wrong artifact, a traceback, a hang, a crash, ..."""
    return result["verdict"] in ("refused", "right") or result["verdict"].startswith("exit")


def attack(part: str, seconds: float, number: int, most: int) -> list[Result]:
    """The results of one part, in this process."""
    logging.disable(logging.ERROR)
    results: list[Result] = []
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="torture-") as name:
        for result in globals()[part](number, Path(name)):
            results.append({"part": part, **result})
            if not held(result):
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
            if time.monotonic() > end or len(results) == most:
                break
    return results


def _lane(parts: list[tuple[str, float]], number: int, most: int) -> list[Result]:
    return [r for part, seconds in parts for r in attack(part, seconds, number, most)]


def table(results: list[Result], minutes: float, number: int) -> str:
    """The counts as Markdown."""
    lines = ["| part | cases | ended as | not held | slowest |", "|---|---|---|---|---|"]
    for part in PARTS:
        mine = [r for r in results if r["part"] == part]
        if not mine:
            continue
        ended = collections.Counter(r["verdict"] for r in mine)
        words = ", ".join(f"{count} {verdict}" for verdict, count in ended.most_common())
        bad = sum(not held(r) for r in mine)
        slowest = max(r["seconds"] for r in mine)
        cases = f"{len(mine)}"
        if part == "kills":
            cases = f"{sum(r['what'] != 'too late' for r in mine)} effective of {len(mine)}"
        if part == "operators":
            count = len({r["what"] for r in mine})
            cases = f"{count} operators, {sum(r['sets'] for r in mine)} sets of sizes"
        lines.append(f"| {part} | {cases} | {words} | {bad} | {slowest:.1f} s |")
    return "\n".join([*lines, "", f"{minutes:g} minutes, seed {number}."])


def write(text: str) -> None:
    """Puts the table between the marks of the page."""
    before, _, rest = DOCS.read_text().partition(BEGIN)
    DOCS.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--cases", type=int, default=10**9, help="at most so many of each part, in each process"
    )
    parser.add_argument("--only", action="append", choices=PARTS, default=[])
    parser.add_argument("--out", type=Path, default=Path("bench-results"))
    parser.add_argument("--write", action="store_true", help="into docs/results/torture.md")
    arguments = parser.parse_args()
    chosen = arguments.only or PARTS
    work = []
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        for place, shares in enumerate(LANES):
            names = [name for name in shares if name in chosen]
            if not names:
                continue
            whole = sum(shares[name] for name in names)
            parts = [(name, 60 * arguments.minutes * shares[name] / whole) for name in names]
            number = arguments.seed + _APART * place
            work.append(pool.submit(_lane, parts, number, arguments.cases))
    results = [result for lane in work for result in lane.result()]
    text = table(results, arguments.minutes, arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    bad = [result for result in results if not held(result)]
    counts = collections.Counter((r["part"], r["verdict"]) for r in results)
    facts = {
        "minutes": arguments.minutes, "seed": arguments.seed, "not held": bad,
        "counts": {f"{part}: {verdict}": n for (part, verdict), n in sorted(counts.items())},
    }  # fmt: skip
    (arguments.out / "torture.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(text)
    if arguments.write:
        write(text)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
