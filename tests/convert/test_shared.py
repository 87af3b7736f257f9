"""Conversions with a shared store: hits, explained misses, damage, and what is pushed."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import onnx
import onnx.parser
import pytest
import tiny
from helpers import Run, refinish, refused_late
from s3_server import bucket, s3_server  # noqa: F401

from pipeline.artifact.artifact import Artifact
from pipeline.convert import driver
from pipeline.convert import keys as keys_module
from pipeline.convert.driver import run
from pipeline.convert.report import Report, verdict
from pipeline.convert.shared import StoreUse
from pipeline.errors import BuildError, CompareError, InputError
from pipeline.machine.progress import StageText
from pipeline.spec.config import Config
from pipeline.store.collect import collect
from pipeline.store.entry import BLOBS, blob_name
from pipeline.store.store import Store

pytest.importorskip("fsspec")
NET = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[b, 8] x) => (float[b, 8] y) {{ y = {op} (x) }}"""


@pytest.fixture(autouse=True)
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``net.onnx`` in the current folder, which needs no torch."""
    monkeypatch.chdir(tmp_path)
    write("Relu")


def write(op: str) -> None:
    onnx.save(onnx.parser.parse_model(NET.format(op=op)), "net.onnx")


def convert(out: str, store: str | None = "store", **changes: object) -> tuple[Report, list[str]]:
    """Converts, and returns the stages that ran."""
    heard: list[str] = []
    fields: dict[str, object] = {"dims": ("b=1:4:8",), "quick": True, "store": store, **changes}
    report = run(Config("net.onnx", out=out, **fields), heard.append)  # type: ignore[arg-type]
    return report, [text.name for text in heard if isinstance(text, StageText)]


def used(report: Report) -> StoreUse:
    assert report.store is not None
    return report.store


EVERY = ["export", "rewrite", "build", "compare"]


@pytest.mark.parametrize("kind", ["local", "memory", "s3"])
def test_another_folder_gets_everything_from_the_store(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = {"local": lambda: "store", "memory": lambda: f"memory://{tmp_path.name}-c"}.get(
        kind, lambda: f"s3://{request.getfixturevalue('bucket')}"
    )()
    first, stages = convert("a", store)
    assert stages == EVERY
    assert used(first).lines() == [
        "miss: the store has no entry of this model",
        f"pushed as entry {first.manifest.keys['compare'][:12]}",
    ]
    second, stages = convert("b", store)
    assert second.unchanged and stages == []
    assert used(second).lines() == [
        f"hit: everything from entry {first.manifest.keys['compare'][:12]}"
    ]
    assert Artifact.open("b").manifest == first.manifest
    for name in first.manifest.files:
        assert Path("a", name).read_bytes() == Path("b", name).read_bytes()


def test_the_stages_that_are_the_same_come_from_the_store() -> None:
    convert("a")
    report, stages = convert("b", profiles=("b=1:4:16",), dims=("b=1:4:16",))
    assert stages == EVERY  # the dims are in the key of the export
    assert "inputs shape b max 8 -> 16" in used(report).lines()[0]
    report, stages = convert("c", profiles=("b=1:2:8",))
    assert stages == ["build", "compare"]
    assert used(report).pulled == ("export", "rewrite")
    (line,) = [line for line in used(report).lines() if line.startswith("miss")]
    assert line.endswith("differs in profile name default -> profile0, profile b none -> 1:2:8")
    report, stages = convert("d", profiles=("b=1:3:8",))
    assert stages == ["build", "compare"]
    assert [each.text for each in used(report).differs] == ["profile b 1:2:8 -> 1:3:8"]


def test_the_nearest_entry_shares_most_stages() -> None:
    """An entry of other sizes has fewer differences, but another export."""
    two = ("b=1:2:8", "b=1:3:8")
    convert("a")
    convert("b", dims=("b=1:4:16",), profiles=("b=1:2:16", "b=1:3:8"))
    report, _ = convert("c", profiles=two)
    assert used(report).pulled == ("export", "rewrite")
    assert used(report).nearest == used(report).entry
    assert {each.stage for each in used(report).differs} == {"build"}


def test_a_miss_names_another_version_and_another_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    convert("a")
    real = keys_module.versions

    def newer(packages: tuple[str, ...]) -> dict[str, str]:
        return {**real(packages), **({"torch": "99.0"} if "torch" in packages else {})}

    monkeypatch.setattr(keys_module, "versions", newer)
    report, stages = convert("b", precision="fp16")
    assert stages == EVERY
    (line, *_) = used(report).lines()
    assert f"torch {real(('torch',))['torch']} -> 99.0" in line
    assert "precision fp32 -> fp16" in line
    assert line in verdict(report, whole=True).replace("\n          ", " ")


def test_another_model_of_the_same_name_is_explained() -> None:
    convert("a")
    write("Tanh")
    report, stages = convert("b")
    assert stages == EVERY and [each.part for each in used(report).differs] == [
        "source onnx", "weights sha256"
    ]  # fmt: skip


def test_a_pushed_artifact_without_its_parts_is_explained_by_its_keys(cli: Run) -> None:
    convert("a", None)
    assert cli("store", "push", "a", "store")[0] == 0
    _, stages = convert("b")
    assert stages == []
    report, stages = convert("c", profiles=("b=1:2:8",))
    assert stages == ["build", "compare"]
    assert "differs in the key of build" in "\n".join(used(report).lines())


def test_a_damaged_blob_is_named_and_made_again() -> None:
    first, _ = convert("a")
    plan = Path("store", blob_name(first.manifest.files["engine.plan"].sha256))
    plan.write_bytes(bytes(plan.stat().st_size))
    report, stages = convert("b")
    assert stages == EVERY
    assert f"blob {plan.relative_to('store')} of engine.plan is damaged" in used(report).damaged[0]
    assert used(report).pushed == first.manifest.keys["compare"]
    report, stages = convert("c")
    assert stages == [] and used(report).damaged == ()


def test_a_lost_entry_and_a_lost_blob_are_misses() -> None:
    first, _ = convert("a")
    (entry,) = Store.open("store").entries()
    Path("store", blob_name(first.manifest.files["exported.onnx"].sha256)).unlink()
    report, stages = convert("b")
    assert stages == EVERY and "is missing" in used(report).damaged[0]
    Path("store", entry.name).unlink()
    report, stages = convert("c")
    assert stages == EVERY and used(report).damaged == ()
    assert collect(Store.open("store"), max_bytes=0, grace=0).kept_entries == 0
    assert list(Path("store", BLOBS).rglob("*.*")) == []
    report, stages = convert("d")
    assert stages == EVERY


def test_an_artifact_that_was_there_already_is_pushed_once() -> None:
    convert("a", None)
    report, stages = convert("a")
    assert stages == [] and used(report).pushed
    report, stages = convert("a")
    assert stages == [] and not used(report).pushed and used(report).lines() == []


def test_what_is_known_of_an_engine_is_kept_in_the_store() -> None:
    """`verify` on a machine with a GPU adds to an artifact. A conversion without a GPU does not."""
    convert("a")
    known = {"engine_compared": True, "engine_compared_why": "compared", "engine_gpu": "a GPU"}
    refinish(Path("a"), **known)
    report, stages = convert("a")
    assert report.unchanged and used(report).pushed
    report, stages = convert("b", force=True)
    assert stages == EVERY and used(report).lines() == []
    store = Store.open("store")
    (entry,) = store.entries()
    assert store.read(entry).manifest.engine_compared


def test_an_entry_with_wrong_parts_is_a_miss() -> None:
    convert("a")
    (entry,) = Store.open("store").entries()
    path = Path("store", entry.name)
    path.write_text(json.dumps({**json.loads(path.read_text()), "parts": "abc"}))
    report, stages = convert("b", dims=("b=1:4:9",))
    assert stages == EVERY and used(report).nearest == ""


def test_the_better_of_folder_and_store_counts() -> None:
    """The store's artifact has another seed. The folder's shares the build too, so it stays."""
    convert("a")
    report, stages = convert("b", None, seed=1)
    before = Artifact.open("b").manifest.created
    report, stages = convert("b", seed=2)
    assert stages == ["compare"] and used(report).pulled == ()
    assert used(report).nearest and before
    report, stages = convert("b", None, profiles=("b=2:3:4",))
    report, stages = convert("b", seed=2)
    assert stages == [] and used(report).pulled == tuple(EVERY)


def test_force_pulls_nothing_and_pushes() -> None:
    convert("a")
    report, stages = convert("b", force=True)
    assert stages == EVERY and used(report).pushed and not used(report).pulled


def test_an_artifact_of_another_source_is_not_replaced() -> None:
    convert("a")
    shutil.copy("net.onnx", "other.onnx")
    run(Config("other.onnx", out="b", dims=("b=1:4:8",), quick=True))
    with pytest.raises(InputError, match=r"b has an artifact of other\.onnx, not of net\.onnx"):
        convert("b")
    assert Artifact.open("b").manifest.model.source == "other.onnx"


def test_a_pulled_artifact_has_the_source_of_its_conversion(tmp_path: Path) -> None:
    """Another machine has the same file at another place. The next conversion must accept it."""
    convert("a")
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copy("net.onnx", tmp_path / "elsewhere")
    config = Config(moved, out="b", dims=("b=1:4:8",), quick=True, store="store")
    assert run(config).unchanged
    assert Artifact.open("b").manifest.model.source == moved


def test_a_store_that_cannot_be_written_is_no_error() -> None:
    Path("store").mkdir()
    Path("store", "tmp").write_text("a file, where a folder must be")
    report, stages = convert("a")
    assert stages == EVERY and Artifact.open("a")
    assert used(report).lines()[-1].startswith("not pushed: store store: File exists")


def test_a_failure_after_a_hit_of_the_first_stages_leaves_the_folder_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    convert("a")
    convert("own", None, dims=("b=1:16:32",))
    before = {path: path.read_bytes() for path in Path("own").rglob("*.*")}

    def fails(*_: object, **__: object) -> None:
        raise BuildError("no engine")

    with monkeypatch.context() as patch:
        patch.setattr(driver, "BUILD", replace(driver.BUILD, run=fails))
        for out in ("own", "new"):
            with pytest.raises(BuildError, match="no engine"):
                convert(out, profiles=("b=1:2:8",))
    assert {path: path.read_bytes() for path in Path("own").rglob("*.*")} == before
    assert not Path("new").exists()
    assert [path.name for path in Path().iterdir() if path.name.startswith(".")] == []
    report, stages = convert("own", profiles=("b=1:2:8",))
    assert stages == ["build", "compare"] and used(report).pulled == ("export", "rewrite")
    assert Artifact.open("own").manifest == report.manifest


def test_a_damaged_blob_of_the_first_stages_leaves_nothing_behind() -> None:
    first, _ = convert("a")
    path = Path("store", blob_name(first.manifest.files["exported.onnx"].sha256))
    path.write_bytes(bytes(path.stat().st_size))
    report, stages = convert("b", profiles=("b=1:2:8",))
    assert stages == EVERY and "of exported.onnx is damaged" in used(report).damaged[0]
    assert [path.name for path in Path().iterdir() if path.name.startswith(".")] == []


@pytest.mark.usefixtures("zoo")
def test_a_failed_conversion_is_not_pushed() -> None:
    pytest.importorskip("torch")
    with pytest.raises(CompareError):
        run(Config("skewed", out="a", store="store"))
    assert Store.open("store").entries() == [] and not Path("store", BLOBS).exists()


def test_a_failed_comparison_that_is_kept_is_not_pushed(cli: Run, artifact: Path) -> None:
    """`convert` keeps an artifact whose half precision failed. It has no key of the comparison."""
    manifest = Artifact.open(artifact).manifest
    assert manifest.comparison is not None
    (point, *rest) = manifest.comparison.points
    (first, *others) = point.results
    bad = replace(point, results=(replace(first, kind="not-finite", text="it has NaN"), *others))
    refinish(artifact, comparison=replace(manifest.comparison, points=(bad, *rest)))
    code, _, errors = cli("store", "push", artifact, "store")
    assert code == 2 and "its comparison failed" in errors


def test_an_object_without_a_key_needs_one() -> None:
    with pytest.raises(InputError, match="tiny is an object without a key"):
        run(Config(tiny.conv(), out="a", store="store"))


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_a_conversion_into_no_bucket_fails_before_any_work(
    cli: Run,
    bucket: str,  # noqa: F811
    force: tuple[str, ...],
) -> None:
    del bucket
    words = ("net.onnx", "--out", "a", "--dim", "b=1:4:8", "--quick", *force)
    found = cli("convert", *words, "--store", "s3://no-such-bucket/x")
    refused_late(found, "there is no bucket no-such-bucket")
    assert "export" not in found[2] and not Path("a").exists()


def test_the_commands(cli: Run) -> None:
    options = ["--dim", "b=1:4:8", "--quick", "--store", "store"]
    code, output, _ = cli("convert", "net.onnx", "--out", "a", *options)
    assert code == 0 and "store:    pushed as entry" in output
    code, output, _ = cli("convert", "net.onnx", "--out", "b", *options)
    assert code == 0 and "store:    hit: everything from entry" in output
    assert "The store has the artifact, so no stage ran." in output
    # a hit says the same as the conversion that pushed the entry
    assert "not done: the engine was not compared" in output and "next:" in output
    code, output, _ = cli("convert", "net.onnx", "--out", "c", *options, "--json")
    assert json.loads(output)["store"]["pulled"] == EVERY
    code, output, _ = cli("store", "ls", "store")
    key = Artifact.open("a").manifest.keys["compare"]
    assert code == 0 and key[:12] in output and " net " in output
    code, output, _ = cli("store", "ls", "store", "--json")
    (entry,) = json.loads(output)["entries"]
    assert entry["key"] == key and entry["name"] == "net" and entry["precision"] == "fp32"
    for name, out in (("net", "d"), (key[:10], "e")):
        code, output, _ = cli("store", "pull", "store", name, out)
        assert code == 0 and output == f"pulled net, entry {key[:12]} -> {out}\n"
        assert Artifact.open(out).manifest == Artifact.open("a").manifest
    code, _, errors = cli("store", "pull", "store", "net", "d")
    assert code == 2 and "d: exists already. Pass another folder" in errors
    code, output, _ = cli("store", "gc", "store", "--max-size", "1KiB")
    assert code == 0 and f"removed net {key[:12]}\n" in output
    assert "that no entry needs: pushed in the last 3600 s" in output
    code, output, _ = cli("store", "gc", "store", "--grace", "0", "--json")
    assert code == 0 and json.loads(output)["blobs"] > 3
    assert cli("store", "ls", "store")[1] == "store has no artifacts\n"
    assert cli("store", "gc", "store", "--grace", "-1")[0] == 2


def test_ls_says_how_two_entries_of_a_model_differ(cli: Run) -> None:
    options = ["net.onnx", "--quick", "--store", "store"]
    for out, dim, more in (("a", "b=1:4:8", ()), ("b", "b=1:4:16", ("--precision", "tf32"))):
        assert cli("convert", *options, "--out", out, "--dim", dim, *more)[0] == 0
    first, second = (Artifact.open(name).manifest.keys["compare"] for name in "ab")
    at = time.time()
    for file in Path("store", "entries").rglob("*.json"):  # the second one is used last
        os.utime(file, (at - 10 * (first in file.name),) * 2)
    start = f"{first[:12]} differs from {second[:12]} in"
    code, output, _ = cli("store", "ls", "store")
    (line,) = (line for line in output.splitlines() if " differs from " in line)
    assert code == 0 and line.startswith(start)
    assert "precision tf32 -> fp32" in line and "16 -> 8" in line
    newest, other = json.loads(cli("store", "ls", "store", "--json")[1])["entries"]
    assert (newest["key"], newest["differs_from"], newest["differs_in"]) == (second, "", "")
    assert other["differs_from"] == second and line == f"{start} {other['differs_in']}"
    # an entry that was pushed by itself lacks the parts of its keys
    (entry,) = Path("store", "entries").rglob(f"*{first}.json")
    entry.unlink()
    assert cli("store", "push", "a", "store")[0] == 0
    output = cli("store", "ls", "store")[1]
    assert f"{second[:12]} differs from {first[:12]} in the key of export" in output

    code, output, _ = cli("store", "pull", "store", "net", "c")
    assert Artifact.open("c").manifest.keys["compare"] == first
    assert "It is the last used of 2 entries of net. pipeline store ls store shows" in output
    assert "last used" not in cli("store", "pull", "store", first[:8], "d")[1]


def test_the_store_in_pipeline_toml(cli: Run) -> None:
    Path("pipeline.toml").write_text(
        '[net]\nsource = "net.onnx"\ndim = "b=1:4:8"\nquick = true\nstore = "store"\n'
    )
    assert cli("convert", "net", "--out", "a")[0] == 0
    assert len(Store.open("store").entries()) == 1
