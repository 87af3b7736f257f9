"""The store itself: push, find and pull, on a local folder, in memory, and on a real S3 server."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest
from helpers import Run, refinish, refused_late
from s3_server import bucket, s3_server  # noqa: F401

from pipeline.artifact.artifact import Artifact
from pipeline.errors import ArtifactError, InputError, StoreError
from pipeline.store import place as place_module
from pipeline.store.collect import collect
from pipeline.store.differences import differences
from pipeline.store.entry import BLOBS, ENTRIES, Entry, blob_name
from pipeline.store.place import TMP, USED, Place
from pipeline.store.store import Store

KINDS = ("local", "memory", "s3")


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    pytest.importorskip("fsspec")
    if request.param == "local":
        return Store.open(str(tmp_path / "store"))
    if request.param == "memory":
        return Store.open(f"memory://{tmp_path.name}")
    return Store.open(f"s3://{request.getfixturevalue('bucket')}/some/path")


def variant(artifact: Path, folder: Path, number: int) -> Path:
    """A copy of an artifact with another engine and another key of the build."""
    shutil.copytree(artifact, folder)
    (folder / "engine.plan").write_bytes(bytes([number]) * 1000)
    keys = dict(Artifact.open(artifact).manifest.keys)
    keys |= {"build": f"{number:064x}", "compare": f"{number + 1000:064x}"}
    refinish(folder, keys=keys)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}


def damage(store: Store, name: str) -> None:
    """Changes one byte of a file in a store, so that its size stays."""
    content = bytearray(store.place.read(name))
    content[len(content) // 2] ^= 1
    store.place.put_bytes(bytes(content), name)


def test_what_is_pushed_is_pulled_to_the_byte(store: Store, artifact: Path, tmp_path: Path) -> None:
    parts = {"export": {"packages": {"torch": "1"}}}
    entry = store.push(Artifact.open(artifact), parts)
    manifest = Artifact.open(artifact).manifest
    (found,) = store.of_model(manifest.name, manifest.keys)
    read = store.read(found)
    assert read.parts == parts and read.manifest == manifest and found.key == entry.key
    store.pull(read, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(artifact)
    assert store.has(manifest)
    assert store.named("tiny").key == found.key
    assert store.named(entry.key[:8]).key == entry.key
    assert store.named(entry.key[:4]).key == entry.key
    with pytest.raises(InputError, match=r"too short for a key\. Pass at least 4 digits, such as"):
        store.named(entry.key[:3])
    with pytest.raises(InputError, match=r"has no entry nothing\. Its models: tiny"):
        store.named("nothing")


def test_a_beginning_of_several_keys(artifact: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    store = Store.open(str(tmp_path / "store"))
    for number in (1, 2):  # their keys begin with many zeros
        store.push(Artifact.open(variant(artifact, tmp_path / str(number), number)))
    with pytest.raises(InputError, match=r"2 keys begin with 00000: 0{12}, 0{12}\. Pass more"):
        store.named("00000")


def test_a_file_that_two_artifacts_share_is_stored_once(
    store: Store, artifact: Path, tmp_path: Path
) -> None:
    store.push(Artifact.open(artifact))
    before = set(store.place.find(BLOBS))
    store.push(Artifact.open(variant(artifact, tmp_path / "other", 1)))
    assert len(set(store.place.find(BLOBS)) - before) == 1
    assert len(store.entries()) == 2


def test_a_push_by_itself_keeps_what_the_store_knows(store: Store, artifact: Path) -> None:
    parts = {"export": {"packages": {"torch": "1"}}}
    store.push(Artifact.open(artifact), parts)
    store.push(Artifact.open(artifact))
    assert store.read(store.entries()[0]).parts == parts


def test_an_entry_whose_engine_was_compared_stays(
    store: Store, artifact: Path, tmp_path: Path
) -> None:
    less = variant(artifact, tmp_path / "less", 1)
    refinish(less, engine_compared=False, engine_compared_why="no GPU")
    more = shutil.copytree(less, tmp_path / "more")
    refinish(more, engine_compared=True, engine_compared_why="compared", engine_gpu="a GPU")
    (known, known_less) = (Artifact.open(path).manifest for path in (more, less))
    store.push(Artifact.open(less))
    assert store.has(known_less) and not store.has(known)
    store.push(Artifact.open(more))
    assert store.has(known_less) and store.has(known)
    assert store.push(Artifact.open(less)).manifest == known
    (found,) = store.entries()
    assert store.read(found).manifest == known
    # an entry that cannot be pulled is not worth keeping
    store.place.remove(blob_name(known.files["engine.plan"].sha256))
    assert store.push(Artifact.open(less)).manifest == known_less
    store.pull(store.read(found), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(less)


@pytest.mark.parametrize("parts", ["abc", [], 3, {"export": "abc"}, {"export": None}])
def test_an_entry_with_wrong_parts_is_not_used(
    artifact: Path, tmp_path: Path, parts: object
) -> None:
    store = Store.open(str(tmp_path / "store"))
    entry = store.push(Artifact.open(artifact))
    content = json.loads(store.place.read(entry.name))
    store.place.put_bytes(json.dumps({**content, "parts": parts}).encode(), entry.name)
    with pytest.raises(ArtifactError, match="is not an entry of this version of pipeline"):
        store.read(store.entries()[0])


@pytest.mark.parametrize("name", ["engine.plan", "comparison/default/torch.json"])
def test_a_damaged_blob_is_named_removed_and_written_again(
    store: Store, artifact: Path, tmp_path: Path, name: str
) -> None:
    entry = store.push(Artifact.open(artifact))
    blob = blob_name(entry.manifest.files[name].sha256)
    damage(store, blob)
    with pytest.raises(ArtifactError, match=f"blob {blob} of {name} is damaged, and was removed"):
        store.pull(entry, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ArtifactError, match=f"blob {blob} of {name} is missing"):
        store.pull(entry, tmp_path / "out")
    store.push(Artifact.open(artifact))
    store.pull(entry, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(artifact)


def test_a_damaged_entry_is_not_used(store: Store, artifact: Path) -> None:
    entry = store.push(Artifact.open(artifact))
    content = store.place.read(entry.name)
    for wrong in (content[:-20], content.replace(b'"tiny"', b'"tinx"'), b"[]", b"null"):
        store.place.put_bytes(wrong, entry.name)
        with pytest.raises(ArtifactError, match="entries/tiny"):
            store.read(store.entries()[0])
    other = entry.name.replace(entry.key, "0" * 64)
    store.place.put_bytes(content, other)
    (found,) = [each for each in store.entries() if each.name == other]
    with pytest.raises(ArtifactError, match="its keys do not belong to its name"):
        store.read(found)


def test_what_did_not_pass_is_not_pushed(store: Store, artifact: Path) -> None:
    manifest = Artifact.open(artifact).manifest
    keys = {name: key for name, key in manifest.keys.items() if name != "compare"}
    refinish(artifact, keys=keys)
    with pytest.raises(InputError, match="has no key of compare, because a stage ran alone"):
        store.push(Artifact.open(artifact))
    assert store.entries() == [] and store.place.find(BLOBS) == {}


def test_a_file_that_changes_during_the_push_is_not_stored(store: Store, artifact: Path) -> None:
    opened = Artifact.open(artifact)
    (artifact / "engine.plan").write_bytes(b"another")
    with pytest.raises(StoreError, match=r"engine\.plan: was changed while it was read"):
        store.push(opened)
    assert store.entries() == []
    stated = opened.manifest.files["engine.plan"].sha256
    assert blob_name(stated) not in store.place.find(BLOBS)


class TestCollect:
    """What `collect` removes."""

    def test_only_what_no_entry_needs(self, store: Store, artifact: Path, tmp_path: Path) -> None:
        entry = store.push(Artifact.open(artifact))
        other = store.push(Artifact.open(variant(artifact, tmp_path / "other", 1)))
        store.place.remove(other.name)
        done = collect(store)
        assert (done.blobs, done.young_blobs, done.young_bytes) == (0, 1, 1000)
        done = collect(store, grace=0)
        assert (done.blobs, done.freed_bytes, done.entries) == (1, 1000, ())
        assert (done.kept_entries, done.kept_bytes) == (1, sum(entry.blobs.values()))
        store.pull(entry, tmp_path / "out")
        assert contents(tmp_path / "out") == contents(artifact)

    def test_the_least_recently_used_first(
        self, store: Store, artifact: Path, tmp_path: Path
    ) -> None:
        made = []
        for number in range(3):
            made.append(
                store.push(Artifact.open(variant(artifact, tmp_path / f"v{number}", number)))
            )
            time.sleep(1.1)  # S3 has whole seconds
        store.pull(made[0], tmp_path / "out")  # now the second one is the oldest
        size = sum({**made[0].blobs, **made[2].blobs}.values())
        done = collect(store, max_bytes=size, grace=0)
        assert done.entries == (made[1].name,) and done.kept_bytes == size
        assert done.freed_bytes == 1000
        assert {each.key for each in store.entries()} == {made[0].key, made[2].key}
        assert len(collect(store, max_bytes=0, grace=0).entries) == 2
        assert store.place.find(BLOBS) == {} and store.place.find(USED) == {}

    def test_a_push_that_relies_on_an_old_blob(self, artifact: Path, tmp_path: Path) -> None:
        """A blob without an entry is old. A push sets its time, so that it stays."""
        store = Store.open(str(tmp_path / "store"))
        entry = store.push(Artifact.open(artifact))
        store.place.remove(entry.name)
        for name in store.place.find(BLOBS):
            os.utime(tmp_path / "store" / name, (1, 1))
        info = entry.manifest.files["engine.plan"]
        store._put(artifact / "engine.plan", info)
        done = collect(store)
        assert done.young_blobs == 1
        assert set(store.place.find(BLOBS)) == {blob_name(info.sha256)}

    def test_blobs_that_go_while_the_entry_is_written(
        self, store: Store, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The push outlasts the grace period, and `collect` runs right before the entry."""
        real = Place.put_bytes

        def late(place: Place, content: bytes, name: str) -> None:
            assert collect(store, grace=0).blobs > 0
            real(place, content, name)

        monkeypatch.setattr(Place, "put_bytes", late)
        entry = store.push(Artifact.open(artifact))
        store.pull(entry, tmp_path / "out")
        assert contents(tmp_path / "out") == contents(artifact)

    def test_what_killed_processes_left(self, tmp_path: Path) -> None:
        store = Store.open(str(tmp_path / "store"))
        left = tmp_path / "store" / TMP / "123-abc"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half")
        collect(store)
        assert left.exists()
        os.utime(left, (1, 1))
        collect(store)
        assert not left.exists()

    def test_a_folder_that_cannot_be_listed_stops_it(
        self, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise the entries in it would not be seen, and their blobs removed."""
        store = Store.open(str(tmp_path / "store"))
        store.push(Artifact.open(artifact))
        blobs = store.place.find(BLOBS)
        real = os.scandir

        def scandir(path: object) -> object:
            if str(path).endswith(f"{ENTRIES}/tiny"):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path)  # type: ignore[call-overload]

        monkeypatch.setattr(os, "scandir", scandir)
        with pytest.raises(StoreError, match="Permission denied"):
            collect(store, grace=0)
        monkeypatch.undo()
        assert store.place.find(BLOBS) == blobs


def test_names_of_models_do_not_leave_their_folder() -> None:
    from pipeline.store.entry import folder_of

    assert folder_of("../a/b c") == "entries/%2E%2E%2Fa%2Fb%20c"


@pytest.mark.parametrize("url", ["", "ftp://host/x", "http://host/x", "s3://", "memory://"])
def test_a_wrong_address(url: str) -> None:
    with pytest.raises(InputError, match="store"):
        Store.open(url)


@pytest.mark.parametrize("url", ["s3:/bucket/x", "gs:bucket", "memory:name"])
def test_an_address_that_would_be_a_local_folder(url: str) -> None:
    with pytest.raises(InputError, match=f"write {url.partition(':')[0]}:// before"):
        Store.open(url)


def test_a_folder_may_have_the_name_of_a_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Store.open("s3").place.local


def test_kinds_of_gpu_differ_by_name() -> None:
    before, after = ({"build": {"gpus": gpus}} for gpus in ([[8, 6], [12, 0]], [(8, 9)]))
    assert [one.text for one in differences(before, after)] == ["gpus sm86, sm120 -> sm89"]
    (none,) = differences({"build": {"gpus": []}}, after)
    assert none.text == "gpus none -> sm89"


@pytest.mark.parametrize(
    ("url", "module", "words"),
    [
        ("store", "fsspec.core", "pip install 'trt-pipeline[store]'"),
        ("s3://bucket/x", "s3fs", "pip install 'trt-pipeline[store]' s3fs"),
        ("gs://bucket/x", "gcsfs", "pip install 'trt-pipeline[store]' gcsfs"),
    ],
)
def test_what_is_not_installed_is_named(
    url: str, module: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = importlib.import_module("fsspec.registry")
    monkeypatch.delitem(registry._registry, url[:2], raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError) as caught:
        Store.open(url)
    assert str(caught.value) == f"store {url}: {words}"


def test_a_bucket_that_does_not_exist(
    cli: Run,
    bucket: str,  # noqa: F811
    artifact: Path,
) -> None:
    url = "s3://no-such-bucket/x"
    store = Store.open(url)
    with pytest.raises(StoreError, match="no such bucket"):
        store.push(Artifact.open(artifact))
    for words in (
        ("store", "ls", url), ("store", "gc", url), ("store", "pull", url, "tiny", "out"),
        ("matrix", "--kubernetes", "image:1", "--store", url),
    ):  # fmt: skip
        refused_late(cli(*words), "there is no bucket no-such-bucket. Create it")
    # an empty bucket is none of that
    assert Store.open(f"s3://{bucket}/x").entries() == []
    assert cli("store", "ls", f"s3://{bucket}")[0] == 0


@pytest.mark.parametrize("forbidden", [True, False])
def test_an_empty_bucket_that_may_not_be_asked_for(*, forbidden: bool) -> None:
    """gcsfs asks for the bucket. If that fails, it lists it, and takes an empty list for none.

    The role Storage Object Admin may not ask. gcsfs needs Google's servers, so this does the same.
    """
    pytest.importorskip("fsspec")
    from fsspec.asyn import AsyncFileSystem

    class Files(AsyncFileSystem):
        cachable = False

        async def _info(self, path: str, **_: object) -> dict[str, object]:
            try:
                raise OSError(f"Forbidden: {path}") if forbidden else FileNotFoundError(path)
            except OSError:
                raise FileNotFoundError(path)  # noqa: B904

    place = Place("gs://bucket/x", Files(), "bucket/x", local=False)
    if forbidden:
        place.check_bucket()
    else:
        with pytest.raises(InputError, match="there is no bucket bucket"):
            place.check_bucket()


@pytest.mark.parametrize(
    "words", [("ls", "nowhere"), ("gc", "nowhere"), ("pull", "nowhere", "tiny", "out")]
)
def test_a_folder_that_does_not_exist(
    cli: Run, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    refused_late(cli("store", *words), "store nowhere: does not exist")
    assert not list(tmp_path.iterdir())


def test_without_credentials_the_error_says_what_to_do(
    bucket: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(StoreError, match=r"NoCredentialsError: .*\. To log in, set AWS_PROFILE"):
        Store.open(f"s3://{bucket}/x").entries()


def test_a_server_that_does_not_answer(
    bucket: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import s3fs

    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    store = Store.open(f"s3://{bucket}/x")
    with pytest.raises(StoreError, match=r"store s3://.*127\.0\.0\.1:9"):
        store.entries()


def test_a_store_that_can_only_be_read(store: Store, artifact: Path, tmp_path: Path) -> None:
    """A pull works although it cannot set the time of the entry."""
    entry = store.push(Artifact.open(artifact))

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place_module.os, "utime", refused)
        patch.setattr(store.place.files, "pipe_file", refused)
        store.pull(entry, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(artifact)


def test_an_entry_is_json_with_the_list_of_blobs(store: Store, artifact: Path) -> None:
    entry = store.push(Artifact.open(artifact))
    content = json.loads(store.place.read(entry.name))
    assert content["blobs"] == entry.blobs
    assert content["manifest"] == json.loads((artifact / "manifest.json").read_bytes())
    assert Entry.from_json(store.place.read(entry.name), entry.name) == entry
