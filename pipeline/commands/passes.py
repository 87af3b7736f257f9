"""The commands on rewrite passes: ``passes``, ``lint``, and ``rewrite`` on any ONNX file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands.table import table
from pipeline.errors import InputError
from pipeline.machine.target import DEFAULT_TARGET, TARGETS, find_target
from pipeline.plugins.loading import provided_ops

if TYPE_CHECKING:
    from pipeline.commands.still_needed import Verdict
    from pipeline.rewrite.rewrite import Rewritten

Announce = Callable[[str], None]


def add_commands(add: Callable[..., Any]) -> None:
    """Adds ``passes`` and ``lint`` to the command line."""
    passes = add("passes", _passes, "List the rewrite passes: who needs them, and why.")
    passes.add_argument(
        "--still-needed", action="store_true",
        help="build every pass's cases on the installed TensorRT, without the pass and with it",
    )  # fmt: skip
    passes.add_argument("--target", metavar="TARGET", help="only what this target needs")
    passes.add_argument("--only", action="append", default=[], metavar="PASS")
    lint = add("lint", _lint, "Say which nodes of an ONNX file a target would fail or go wrong on.")
    lint.add_argument("model", type=Path, metavar="MODEL.onnx")
    lint.add_argument("--target", default=DEFAULT_TARGET, metavar="TARGET", help=", ".join(TARGETS))
    own_pass(lint)


def own_pass(sub: Any) -> None:
    """The option for a pass of one's own."""
    sub.add_argument(
        "--pass", action="append", default=[], dest="own", type=Path, metavar="FILE.py",
        help="a rewrite pass of your own, run before the others",
    )  # fmt: skip


def choice(sub: Any, *, only: bool) -> None:
    """The options that choose among the passes."""
    if only:
        sub.add_argument("--only", action="append", default=[], metavar="PASS")
    sub.add_argument(
        "--skip", action="append", default=[], metavar="PASS", help="leave this pass out"
    )
    own_pass(sub)


def rewrite_options(sub: Any) -> None:
    """The options of ``rewrite``."""
    sub.add_argument("source", type=Path, metavar="ARTIFACT|MODEL.onnx")
    sub.add_argument("--target", metavar="TARGET", help="default: the artifact's, or rtx-1.7")
    sub.add_argument(
        "--out", type=Path, metavar="FILE",
        help="of an ONNX file: where the result goes (default: MODEL.TARGET.onnx)",
    )  # fmt: skip
    sub.add_argument("--diff", action="store_true", help="show what changed, node by node")
    choice(sub, only=True)


def rewrite_file(arguments: argparse.Namespace, announce: Announce) -> int:
    """``rewrite`` on an ONNX file that is no part of an artifact."""
    from pipeline.rewrite.choose import all_passes, to_skip
    from pipeline.rewrite.rewrite import raise_refused, rewrite

    source: Path = arguments.source
    target = find_target(arguments.target or DEFAULT_TARGET)
    out: Path = arguments.out or source.with_name(f"{source.stem}.{target}.onnx")
    if not out.parent.is_dir():
        raise InputError(f"{out}: its folder is not there")
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
        print(json.dumps({"out": str(out), **asdict(result)}, indent=2))
    else:
        print(_rewrite_text(result, out, arguments.skip))
    raise_refused(result)
    return 0


def _rewrite_text(result: Rewritten, out: Path, skipped: Sequence[str]) -> str:
    lines = []
    for record in result.passes:
        if record.skipped and record.name in skipped:
            lines.append(f"{record.name}: skipped, though {result.target} needs it")
        if record.rewritten:
            lines.append(f"{record.name}: {record.summary}")
        lines += [f"  {c.op} {c.node}: {c.detail}" for c in record.rewritten]
        lines += [f"  not mended: {c.op} {c.node}: {c.detail}" for c in record.refused]
        lines += [f"  {line}" for line in record.diff]
    lines += [f"warning: {text}" for text in result.warnings]
    if not result.refused:
        nodes = f"{result.nodes_before} nodes before, {result.nodes_after} after"
        what = nodes if result.changed else "nothing to rewrite, copied as it is"
        left = sum(r.skipped for r in result.passes)
        some = f"; {left} passes that {result.target} needs were left out" if left else ""
        lines.append(f"{out}: opset {result.opset}, {what}{some}; numbers were not compared")
    return "\n".join(lines)


def _lint(arguments: argparse.Namespace, announce: Announce) -> int:
    from pipeline.rewrite.choose import all_passes
    from pipeline.rewrite.lint import lint

    target = find_target(arguments.target)
    announce(f"lint {arguments.model} for {target}")
    result = lint(arguments.model, target, all_passes(arguments.own))
    if arguments.json:
        print(json.dumps(asdict(result), indent=2))
        return 0 if result.ok else 1
    for f in result.findings:
        state = "mended" if f.mended else ("NOT MENDED" if f.certain else "may fail or be wrong")
        print(f"{f.op} {f.node}{f.origin}\n  {target}: {f.fault}\n  {state}: {f.how}")
    for text in result.warnings:
        print(f"warning: {text}")
    bad = sum(1 for f in result.findings if not f.mended and f.certain)
    print(
        f"{arguments.model}, {target}: {len(result.findings)} nodes would fail or go wrong as they "
        f"stand; {bad} of them can't be mended"
        if result.findings
        else f"{arguments.model}, {target}: nothing known to fail or go wrong"
    )
    return 0 if result.ok else 1


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
        print(json.dumps(facts, indent=2))
        return 0
    for f in facts:
        print(f"{f['name']}: {f['summary']}")
        fault = "makes engines smaller or builds faster" if f["clean_up"] else f["fault"]
        print(f"  targets:  {'; '.join(f['targets'])}")  # type: ignore[arg-type]
        print(f"  without:  {fault or '-'}")
        for text in f["evidence"]:  # type: ignore[attr-defined]
            print(f"  evidence: {text}")
    return 0


def _still_needed(arguments: argparse.Namespace, announce: Announce) -> int:
    from pipeline.commands.still_needed import installed_target, still_needed

    target = installed_target(arguments.target)
    announce(f"building every pass's cases on {target}")
    verdicts = list(still_needed(target, only=arguments.only))
    if arguments.json:
        print(json.dumps([asdict(v) for v in verdicts], indent=2, default=str))
    else:
        print(_verdict_table(verdicts))
    return 1 if any(v.contradicted for v in verdicts) else 0


def _verdict_table(verdicts: Sequence[Verdict]) -> str:

    words = {
        "needed": "needed",
        "needless": "NEEDLESS here: every case comes out right without it",
        "open": "no case fails without it; only a GPU can tell the numbers, or its need is only "
        "read or assumed",
        "covered": "not needed: other passes mend its cases",
        "broken": "BROKEN: a case fails with it",
    }
    rows = []
    for v in verdicts:
        fail = [t for t in v.trials if t.without.failed]
        how = ", ".join(sorted({t.without.verdict for t in fail})) or "-"
        said = words[v.answer]
        if v.answer == "needed" and not v.declared:
            said = "NEEDED, though its data say that this version does not"
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
        f"{v.name}, case {name}, left out: {why}" for v in verdicts for name, why in v.left_out
    ]
    head = ["pass", "declared", "cases that fail without", "how", "on this TensorRT"]
    return "\n".join([table([head, *rows]), *lines])
