"""Tries every pass's cases on the installed TensorRT, before and after the passes.

    python benchmarks/patterns/case_verdicts.py --target tensorrt-8.6 \
        --write passes/cases/measured.json

On a machine with a GPU that the target's engines run on, the numbers are compared, too. Each case
is parsed, built and run at its shapes. It is tried twice: unchanged, and after the case's passes
and all passes that the target needs. If the passes change nothing, one trial is enough. A case that
a pass refuses is tried unchanged only.

`--json` stores TensorRT's messages. If other passes also change a case, it stores the result of
these passes alone. If that result fails, the case proves that its pass is needed.

`--write` replaces the verdicts of the tried cases, and removes those of deleted cases. All other
verdicts stay. So an interrupted run, or a run of some passes, adds to the file.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from pipeline.build.try_graph import attempt
from pipeline.commands.still_needed import apply, installed_target
from pipeline.machine.child import Child
from pipeline.machine.gpu import Gpu, find_gpu, why_not
from pipeline.machine.target import Target, installed_version
from pipeline.passes import DEFAULT_PASSES
from pipeline.passes.case import Case
from pipeline.passes.cases import CASES, measured

Row = dict[str, Any]
_NOT_TRIED = "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", default="tensorrt-8.6")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--limit", type=float, default=540, metavar="SECONDS")
    parser.add_argument("--only", nargs="*", default=(), metavar="PASS")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="try nothing, write a table")
    arguments = parser.parse_args()
    if arguments.table:
        put_table(arguments.table, arguments.target)
        return
    target = installed_target(arguments.target)
    cases = [c for c in CASES if not arguments.only or c.pass_name in arguments.only]
    rows = tried(cases, target, arguments.workers, arguments.limit)
    print(f"{len(rows)} of {len(cases)} cases tried on {target}")
    counts = Counter((row["kind"], row["without"][0], row["with"][0]) for row in rows)
    for (kind, without, after), number in sorted(counts.items()):
        print(f"{number:4} {kind}: {without} as it stands, {after} with the passes")
    for row in rows:
        if row["with"][0] not in ("right", "builds", _NOT_TRIED):
            print(f"{row['case']}: {': '.join(row['with'])}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    if arguments.write:
        gpu = find_gpu()
        on = gpu.name if isinstance(gpu, Gpu) and not why_not(target) else "no GPU"
        on = f"TensorRT {installed_version(target)}, {on}"
        verdicts = {row["case"]: (row["without"][0], row["with"][0]) for row in rows}
        write(arguments.write, target, on, verdicts)


def tried(cases: Sequence[Case], target: Target, workers: int, limit: float) -> list[Row]:
    """A row for each case that was reached within `limit` seconds.

    At that time a running trial is ended with its child process.
    """
    todo: queue.Queue[Case] = queue.Queue()
    for case in cases:
        todo.put(case)
    rows: list[Row] = []
    end = time.monotonic() + limit
    children = [Child() for _ in range(workers)]

    def work(child: Child) -> None:
        while time.monotonic() < end:
            try:
                case = todo.get_nowait()
            except queue.Empty:
                break
            row = _tried(child, case, target)
            if time.monotonic() < end:
                rows.append(row)

    threads = [threading.Thread(target=work, args=(child,), daemon=True) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    for child in children:
        child.close()
    order = {str(case): n for n, case in enumerate(cases)}
    return sorted(rows, key=lambda row: order[row["case"]])


def _tried(child: Child, case: Case, target: Target) -> Row:
    started = time.monotonic()
    needed = [p for p in DEFAULT_PASSES if p.name == case.pass_name or p.needed_by(target)]
    source = case.model()
    row: Row = {"case": str(case), "kind": case.kind}
    row["without"] = _verdict(child, source, case, target)
    row["with"] = (_NOT_TRIED, "")
    if case.kind != "refusal":
        try:
            after = apply(case.model(), needed)
            others = apply(case.model(), [p for p in needed if p.name != case.pass_name])
        except Exception as error:  # any error of a pass or of its check is the result of this row
            row["with"] = ("error", repr(error))
        else:
            row["with"] = row["without"]
            if not _same(after, source):
                row["with"] = _verdict(child, after, case, target)
            if case.kind == "positive" and not _same(others, source) and not _same(others, after):
                row["others"] = _verdict(child, others, case, target)
    row["seconds"] = round(time.monotonic() - started, 2)
    return row


def _verdict(child: Child, model: onnx.ModelProto, case: Case, target: Target) -> tuple[str, str]:
    feeds = [case.feeds(shapes) for shapes in case.shapes]
    try:
        outcome = attempt(child, model, feeds, target, case.precision)
    except (
        Exception
    ) as error:  # an error of ONNX Runtime or a missing library is not a result of the case
        return "error", repr(error)[:500]
    return outcome.verdict, outcome.detail[:500]


def _same(one: onnx.ModelProto, other: onnx.ModelProto) -> bool:
    """True if the nodes and the opsets are the same."""
    return [n.SerializeToString(deterministic=True) for n in one.graph.node] == [
        n.SerializeToString(deterministic=True) for n in other.graph.node
    ] and {o.domain: o.version for o in one.opset_import} == {
        o.domain: o.version for o in other.opset_import
    }


def write(path: Path, target: Target, on: str, verdicts: Mapping[str, Sequence[str]]) -> None:
    """Writes a target's verdicts into a file, one line for each case in the order of `CASES`.

    Args:
        on: The TensorRT version and the GPU.
        verdicts: Two verdicts by case. They replace those in the file. Other cases keep their
            verdicts.
    """
    content = json.loads(path.read_text()) if path.is_file() else {}
    known = {**content.get(target.name, {"cases": {}})["cases"], **verdicts}
    content[target.name] = {
        "on": on,
        "cases": {str(c): known[str(c)] for c in CASES if str(c) in known},
    }
    parts = []
    for name, each in content.items():
        lines = ",\n".join(f"{json.dumps(c)}: {json.dumps(v)}" for c, v in each["cases"].items())
        parts.append(f'"{name}": {{"on": {json.dumps(each["on"])}, "cases": {{\n{lines}\n}}}}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


BEGIN, END = "<!-- cases: begin -->", "<!-- cases: end -->"


def put_table(path: Path, target: str) -> None:
    """Writes a target's results from `measured` between the marks of a Markdown document.

    The table has a line for each pass. It also has a line for each case that is not right with the
    passes, or was not tried.
    """
    verdicts = measured(target)
    lines = ["| pass | cases tried | fail as they stand | how | right with the passes |"]
    lines.append("|---|---|---|---|---|")
    rest = []
    for p in DEFAULT_PASSES:
        mine = [c for c in CASES if c.pass_name == p.name and c.kind == "positive"]
        tried = [verdicts[str(c)] for c in mine if str(c) in verdicts]
        bad = Counter(without for without, _ in tried if without not in ("right", "error", "-"))
        right = sum(after == "right" for _, after in tried)
        how = ", ".join(f"{name} {number}" for name, number in sorted(bad.items()))
        if mine:
            numbers = f"{len(tried)} of {len(mine)} | {sum(bad.values())} | {how} | {right}"
            lines.append(f"| {p.name} | {numbers} |")
        for case in mine:
            without, after = verdicts.get(str(case), ("not tried", "not tried"))
            if after != "right":
                why = case.not_for.get(target, "the proof needs a run on a GPU")
                rest.append(f"| {p.name} | {case.name} | {without} | {after} | {why} |")
    lines += ["", "Not right with the passes there, or not proved:", ""]
    lines += ["| pass | case | as it stands | with the passes | |", "|---|---|---|---|---|", *rest]
    before, mark, after_mark = path.read_text().partition(BEGIN)
    if not mark or END not in after_mark:
        raise SystemExit(f"{path}: needs the lines {BEGIN} and {END}")
    text = "\n".join(lines)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after_mark.partition(END)[2]}")


if __name__ == "__main__":
    main()
