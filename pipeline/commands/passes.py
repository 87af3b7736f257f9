"""The commands ``passes``, ``lint``, and ``rewrite`` for an ONNX file of any origin."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands.output import show
from pipeline.commands.table import table
from pipeline.errors import InputError
from pipeline.machine.target import DEFAULT_TARGET, TARGETS, find_target
from pipeline.plugins.loading import provided_ops

if TYPE_CHECKING:
    from pipeline.commands.still_needed import PassAnswer
    from pipeline.rewrite.lint import LintResult
    from pipeline.rewrite.rewrite import Rewritten

Announce = Callable[[str], None]


def add_commands(add: Callable[..., Any]) -> None:
    """Adds ``passes`` and ``lint`` to the command line."""
    passes = add(
        "passes", _passes, "List the rewrite passes, the targets that need them, and the evidence."
    )
    passes.add_argument(
        "--still-needed", action="store_true",
        help="Build the cases of every pass on the installed TensorRT, without and with the pass",
    )  # fmt: skip
    passes.add_argument(
        "--target", metavar="TARGET", help="List only the passes that this target needs"
    )
    passes.add_argument(
        "--only", action="append", default=[], metavar="PASS",
        help="List only this pass. Repeat for more",
    )  # fmt: skip
    lint = add(
        "lint", _lint, "List the nodes of an ONNX file that a target refuses or computes wrongly."
    )
    lint.add_argument("model", type=Path, metavar="MODEL.onnx", help="ONNX file to examine")
    lint.add_argument(
        "--target", default=DEFAULT_TARGET, metavar="TARGET",
        help=f"Set the TensorRT version: {', '.join(TARGETS)} (default: {DEFAULT_TARGET})",
    )  # fmt: skip
    own_pass(lint)


def own_pass(sub: Any) -> None:
    """Adds the option for a user-supplied pass."""
    sub.add_argument(
        "--pass", action="append", default=[], dest="own", type=Path, metavar="FILE.py",
        help="Run your own rewrite pass, before the others: a file, or a name that an installed "
        "package offers. Repeat for more",
    )  # fmt: skip


def choice(sub: Any, *, only: bool) -> None:
    """Adds the options that choose passes."""
    if only:
        sub.add_argument(
            "--only", action="append", default=[], metavar="PASS",
            help="Run only this pass, and those of --pass. Repeat for more",
        )  # fmt: skip
    sub.add_argument(
        "--skip", action="append", default=[], metavar="PASS",
        help="Do not run this pass. Repeat for more",
    )  # fmt: skip
    own_pass(sub)


def rewrite_options(sub: Any) -> None:
    """Adds the options of ``rewrite``."""
    sub.add_argument(
        "source", type=Path, metavar="ARTIFACT|MODEL.onnx",
        help="Folder of an artifact, or an ONNX file of any origin",
    )  # fmt: skip
    sub.add_argument(
        "--target", metavar="TARGET",
        help=f"Set the TensorRT version: {', '.join(TARGETS)} (default: the artifact's target, or "
        f"{DEFAULT_TARGET})",
    )  # fmt: skip
    sub.add_argument(
        "--out", type=Path, metavar="FILE",
        help="Write the result of an ONNX file here (default: MODEL.TARGET.onnx)",
    )  # fmt: skip
    sub.add_argument(
        "--diff", action="store_true", help="Print each change to an ONNX file, node by node"
    )
    choice(sub, only=True)


def rewrite_file(arguments: argparse.Namespace, announce: Announce) -> int:
    """Runs ``rewrite`` on an ONNX file that belongs to no artifact."""
    from pipeline.rewrite.choose import all_passes, to_skip
    from pipeline.rewrite.rewrite import raise_refused, rewrite

    source: Path = arguments.source
    target = find_target(arguments.target or DEFAULT_TARGET)
    out: Path = arguments.out or source.with_name(f"{source.stem}.{target}.onnx")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: the folder {out.parent} does not exist. Create it first")
    passes = all_passes(arguments.own)
    skip = to_skip(passes, arguments.only, arguments.skip)
    announce(f"rewrite {source}")
    kept = provided_ops(arguments.plugin, target) if arguments.plugin else ()
    result = rewrite(
        source, out, target, passes, skip=skip, keep_functions=kept, diff=arguments.diff
    )
    if result.refused:
        out.unlink()
        Path(f"{out}.data").unlink(missing_ok=True)
    if arguments.json:
        show(json.dumps({"out": str(out), **asdict(result)}, indent=2))
    else:
        show(_rewrite_text(result, out, arguments.skip))
    raise_refused(result)
    return 0


def _rewrite_text(result: Rewritten, out: Path, skipped: Sequence[str]) -> str:
    lines = []
    for record in result.passes:
        if record.skipped and record.name in skipped:
            lines.append(
                f"{record.name}: skipped on request, although {result.target} needs this pass"
            )
        if record.rewritten:
            lines.append(f"{record.name}: {record.summary}")
        lines += [f"  {c.op} {c.node}: {c.detail}" for c in record.rewritten]
        lines += [f"  not rewritten: {c.op} {c.node}: {c.detail}" for c in record.refused]
        lines += [f"  {line}" for line in record.diff]
    lines += [f"warning: {text}" for text in result.warnings]
    if not result.refused:
        nodes = f"{result.nodes_before} nodes before, {result.nodes_after} after"
        what = nodes if result.changed else "no rewrite was needed, the file is a copy"
        left = sum(r.skipped for r in result.passes)
        skips = "1 pass that {} needs was" if left == 1 else f"{left} passes that {{}} needs were"
        some = f"; {skips.format(result.target)} skipped" if left else ""
        lines.append(f"{out}: opset {result.opset}, {what}{some}; numbers were not compared")
    return "\n".join(lines)


def _lint(arguments: argparse.Namespace, announce: Announce) -> int:
    from pipeline.rewrite.choose import all_passes
    from pipeline.rewrite.lint import lint

    target = find_target(arguments.target)
    announce(f"lint {arguments.model} for {target}")
    result = lint(arguments.model, target, all_passes(arguments.own))
    if arguments.json:
        show(json.dumps(asdict(result), indent=2))
        return 0 if result.ok else 1
    for f in result.findings:
        state = "fixed" if f.mended else ("NOT FIXED" if f.certain else "may fail or be wrong")
        show(f"{f.op} {f.node}{f.origin}\n  {target}: {f.fault}\n  {state}: {f.how}")
    for text in result.warnings:
        show(f"warning: {text}")
    show(f"{arguments.model}, {target}: {_lint_verdict(result)}")
    return 0 if result.ok else 1


def _lint_verdict(result: LintResult) -> str:
    """How many nodes are faulty, and whether the passes fix them."""
    count = len(result.findings)
    if not count:
        return "no known fault"
    bad = sum(not f.mended and f.certain for f in result.findings)
    open_ = sum(not f.mended and not f.certain for f in result.findings)
    nodes, them = ("1 node", "it") if count == 1 else (f"{count} nodes", "them")
    left = them if count == 1 else f"{bad} of them"
    if open_:
        parts = [(count - bad - open_, "fixed by the passes"), (bad, "fixed by no pass"),
                 (open_, "not fixed, and may be right as it is")]  # fmt: skip
        states = ", ".join(f"{number} {what}" for number, what in parts if number)
        return f"{nodes} would or may fail or be wrong without a rewrite: {states}"
    fixed = f"no pass fixes {left}" if bad else f"the passes fix {them}"
    return f"{nodes} would fail or be wrong without a rewrite; {fixed}"


def _passes(arguments: argparse.Namespace, announce: Announce) -> int:
    from pipeline.rewrite.choose import all_passes, to_skip

    passes = all_passes()
    skip = to_skip(passes, arguments.only, ())
    if arguments.still_needed:
        return _still_needed(arguments, announce)
    target = find_target(arguments.target) if arguments.target else None
    chosen = [p for p in passes if p.name not in skip and (target is None or p.needed_by(target))]
    facts = [
        {
            "name": p.name,
            "summary": p.summary,
            "fault": p.fault,
            "clean_up": p.clean_up,
            "needed_by": [name for name, t in TARGETS.items() if p.needed_by(t)],
            "targets": [str(needs) for needs in p.targets],
            "evidence": list(p.evidence),
        }
        for p in chosen
    ]
    if arguments.json:
        show(json.dumps(facts, indent=2))
        return 0
    for f in facts:
        show(f"{f['name']}: {f['summary']}")
        show(f"  targets:  {'; '.join(f['targets'])}")  # type: ignore[arg-type]
        show(f"  without:  {f['fault'] or '-'}")
        for text in f["evidence"]:  # type: ignore[attr-defined]
            show(f"  evidence: {text}")
    return 0


def _still_needed(arguments: argparse.Namespace, announce: Announce) -> int:
    from pipeline.commands.still_needed import installed_target, still_needed

    target = installed_target(arguments.target)
    announce(f"build the cases of every pass on {target}")
    verdicts = list(still_needed(target, only=arguments.only))
    if arguments.json:
        show(json.dumps([asdict(v) for v in verdicts], indent=2, default=str))
    else:
        show(_verdict_table(verdicts))
    return 1 if any(v.contradicted for v in verdicts) else 0


def _verdict_table(verdicts: Sequence[PassAnswer]) -> str:

    words = {
        "needed": "needed",
        "needless": "NEEDLESS here: every case is right without the pass",
        "open": "undecided: no case fails without the pass, but the numbers need a GPU, or the "
        "need was not measured",
        "covered": "not needed: other passes fix its cases",
        "broken": "BROKEN: a case fails with the pass",
    }
    rows = []
    for v in verdicts:
        fail = [t for t in v.trials if t.without.failed]
        how = ", ".join(sorted({t.without.verdict for t in fail})) or "-"
        said = words[v.answer]
        if v.answer == "needed" and not v.declared:
            said = "NEEDED, although the pass does not declare this version"
        rows.append(
            [v.name, "yes" if v.declared else "no", f"{len(fail)} of {len(v.trials)}", how, said]
        )
    lines = [
        f"{v.name}, case {t.case.name}, with the pass: {t.after.verdict}: {t.after.detail}"
        for v in verdicts
        for t in v.trials
        if t.after.failed
    ]
    lines += [
        f"{v.name}, case {name}, not built: {why}" for v in verdicts for name, why in v.left_out
    ]
    head = ["pass", "declared", "cases that fail without it", "how", "on this TensorRT"]
    return "\n".join([table([head, *rows]), *lines])
