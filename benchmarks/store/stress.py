"""Attacks a shared store: many processes push and pull at once, and are killed at random moments.

    python benchmarks/store/stress.py --lookups 10000

Each process looks up a random artifact among the newest ones. It pulls and checks it if it is
there, and pushes it otherwise, as `convert --store` does. In the second half, one process also
removes artifacts with `collect` all the time. The script prints counts as JSON. Its exit code is 1
if a lookup was torn or wrong. Without `collect`, a lost blob is a fault too.

``--plant`` writes blobs in place, without the rename. The script must notice that. ``--s3`` attacks
an S3 server in place of a folder: that of the package moto, on this machine.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx.parser

from pipeline.artifact.artifact import Artifact, finish
from pipeline.artifact.manifest import Manifest
from pipeline.convert.driver import run_export
from pipeline.errors import ArtifactError, PipelineError
from pipeline.spec.config import Config
from pipeline.store.collect import collect
from pipeline.store.entry import BLOBS, STAGES, Entry
from pipeline.store.place import TMP, Place
from pipeline.store.store import Store

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[b, 8] x) => (float[b, 8] y) { y = Relu (x) }"""
# one letter for each lookup, in each process's own log
HIT, MISS, LOST, TORN, WRONG, PUSHED, FAILED = "HMLTWPF"
NAMES = {
    HIT: "hits", MISS: "misses", LOST: "lost", TORN: "torn", WRONG: "wrong", PUSHED: "pushes",
    FAILED: "failed",
}  # fmt: skip
LOOKUPS = (HIT, MISS, LOST, TORN, WRONG)
_PER_ARTIFACT = 8  # lookups for each new artifact, about
_NEWEST = 12  # artifacts to choose from
_MODELS = 8  # models that the artifacts belong to
_SHARED = 200_000  # bytes of a file that several artifacts share
_HALF_WRITTEN = 0.02  # seconds that a planted fault leaves a file half written
_KILL = (0.01, 0.15)  # seconds between two kills
_KILL_S3 = (0.2, 1.0)  # a lookup takes longer there


@dataclass(frozen=True)
class Attack:
    """What all processes know.

    Args:
        folder: A folder for logs, artifacts and the store.
        manifest: The manifest that all artifacts begin with.
        url: The store; by default a folder in `folder`.
        plant: Whether blobs are written in place.
        collects: Whether the first process runs `collect`.
    """

    folder: Path
    manifest: Manifest
    url: str = ""
    plant: bool = False
    collects: bool = False

    @property
    def store(self) -> Store:
        return Store.open(self.url or str(self.folder / "store"))

    def contents(self, number: int) -> dict[str, bytes]:
        """The files of an artifact: always the same ones for the same number."""
        own = random.Random(number)
        return {
            "exported.onnx": random.Random(number // 4).randbytes(_SHARED),
            "engine.plan": own.randbytes(own.randrange(1, 300_000)),
            "comparison/default/torch.json": b"{}",
        }

    def keys(self, number: int) -> dict[str, str]:
        texts = {"export": f"{number // 4}", "rewrite": f"{number // 2}"}
        return {
            stage: hashlib.sha256(f"{stage} {texts.get(stage, number)}".encode()).hexdigest()
            for stage in STAGES
        }

    def manifest_of(self, number: int) -> Manifest:
        return replace(
            self.manifest, name=f"model{number % _MODELS}", keys=self.keys(number), files={}
        )


def look_up(attack: Attack, number: int, out: Path) -> str:
    """Looks up an artifact. Returns the letter of what was found."""
    store, manifest = attack.store, attack.manifest_of(number)
    wanted = Entry(manifest).name
    listed = [e for e in store.of_model(manifest.name, manifest.keys) if e.name == wanted]
    if not listed:
        return MISS
    try:
        entry = store.read(listed[0])
        store.pull(entry, out)
    except ArtifactError as error:
        gone = "missing" in error.message or "not in the store any more" in error.message
        return LOST if gone else TORN
    contents = attack.contents(number)
    found = {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and path.name != "manifest.json"
    }
    right = found == contents and Artifact.open(out).manifest.keys == manifest.keys
    return HIT if right else WRONG


def push(attack: Attack, number: int, folder: Path) -> str:
    """Makes an artifact, and pushes it. Returns `PUSHED`."""
    for name, content in attack.contents(number).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    finish(folder, attack.manifest_of(number))
    attack.store.push(Artifact.open(folder))
    return PUSHED


def work(attack: Attack, index: int, seed: int, done: Any) -> None:
    """One process: looks up and pushes until it is killed."""
    if attack.plant:
        Place._move = _in_place  # type: ignore[method-assign]
    moments = random.Random(seed)
    log = os.open(attack.folder / f"{index}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for turn in itertools.count():
        newest = done.value // _PER_ARTIFACT + 1
        number = max(0, newest - moments.randrange(_NEWEST))
        out, made = (attack.folder / f"{index}-{seed}-{turn}-{word}" for word in ("out", "made"))
        try:
            if attack.collects and index == 0:
                collect(attack.store, max_bytes=moments.choice([2_000_000, 6_000_000]), grace=0.3)
                continue
            found = look_up(attack, number, out)
            os.write(log, found.encode())
            if found in (MISS, LOST, TORN):
                os.write(log, push(attack, number, made).encode())
        except PipelineError as error:
            os.write(log, FAILED.encode())
            with (attack.folder / "errors.txt").open("a") as file:
                file.write(f"{error}\n")
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(made, ignore_errors=True)


def _in_place(place: Place, beside: Path, name: str) -> None:
    """What `Place._move` must not do: a reader sees the first half of the file alone."""
    path = Path(place.root) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = beside.read_bytes()
    with path.open("wb") as file:
        file.write(content[: len(content) // 2])
        file.flush()
        time.sleep(_HALF_WRITTEN)
        file.write(content[len(content) // 2 :])


def attacked(attack: Attack, lookups: int, processes: int, seed: int) -> dict[str, int]:
    """Runs the processes, and kills one after the other, until there were enough lookups.

    Returns:
        The counts by name.
    """
    context = multiprocessing.get_context("fork")
    moments = random.Random(seed)
    done = context.Value("q", 0, lock=False)
    seeds = itertools.count(seed * 1_000_000)

    def start(index: int) -> Any:
        process = context.Process(target=work, args=(attack, index, next(seeds), done))
        process.start()
        return process

    running = [start(index) for index in range(processes)]
    kills = 0
    try:
        while True:
            time.sleep(moments.uniform(*(_KILL_S3 if attack.url else _KILL)))
            found = letters(attack.folder)
            done.value = sum(found[letter] for letter in LOOKUPS)
            if done.value >= lookups:
                break
            index = moments.randrange(processes)
            running[index].kill()
            running[index].join()
            kills += 1
            running[index] = start(index)
    finally:
        for process in running:
            process.kill()
            process.join()
    found = letters(attack.folder)
    counts = {NAMES[letter]: found[letter] for letter in NAMES}
    return {"lookups": sum(found[letter] for letter in LOOKUPS), "kills": kills, **counts}


def letters(folder: Path) -> collections.Counter[str]:
    """How often each letter is in the logs."""
    return collections.Counter("".join(log.read_text() for log in folder.glob("*.log")))


def remains(store: Store) -> dict[str, int]:
    """What the killed processes left: damaged files have to be none."""
    place = store.place
    blobs = place.find(BLOBS)
    damaged = sum(
        hashlib.sha256(place.read(name)).hexdigest() != name.rpartition("/")[2] for name in blobs
    )
    incomplete = unreadable = 0
    entries = store.entries()
    for listed in entries:
        try:
            files = store.read(listed).manifest.files
        except ArtifactError:
            unreadable += 1
            continue
        there = {name.rpartition("/")[2] for name in blobs}
        incomplete += any(info.sha256 not in there for info in files.values())
    unfinished = len(place.find(TMP))
    collect(store, grace=0.0)
    return {
        "entries": len(entries),
        "unreadable entries": unreadable,
        "incomplete entries": incomplete,
        "blobs": len(blobs),
        "damaged blobs": damaged,
        "unfinished files": unfinished,
        "unfinished files after gc": len(place.find(TMP)),
    }


@contextlib.contextmanager
def s3_bucket() -> Iterator[str]:
    """Starts moto's S3 server on a free port, and gives the address of an empty bucket."""
    import s3fs

    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
    ):
        try:
            url = ""
            while not url:
                time.sleep(0.2)
                if server.poll() is not None:
                    raise RuntimeError("moto's server ended. Is moto[server] installed?")
                log.seek(0)
                found = re.search(r"http://127\.0\.0\.1:\d+", log.read())
                url = found.group() if found else ""
            os.environ |= {
                "AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1",
            }  # fmt: skip
            s3fs.S3FileSystem.clear_instance_cache()
            s3fs.S3FileSystem().mkdir("stress")
            yield "s3://stress/store"
        finally:
            server.terminate()


def phase(
    lookups: int, processes: int, seed: int, plant: bool, collects: bool, s3: bool = False
) -> dict[str, int]:
    """Attacks a new store, and returns all counts."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(s3_bucket()) if s3 else ""
        onnx.save(onnx.parser.parse_model(MODEL), folder / "relu.onnx")
        config = Config(str(folder / "relu.onnx"), out=folder / "relu", dims=("b=1:8",))
        start = run_export(config).manifest
        attack = Attack(folder, start, url, plant, collects)
        counts = attacked(attack, lookups, processes, seed)
        if (folder / "errors.txt").is_file():
            print((folder / "errors.txt").read_text(), file=sys.stderr)
        return {**counts, **remains(attack.store)}


def is_good(counts: dict[str, int], collects: bool) -> bool:
    """True if no lookup and no file is damaged, and no blob is lost without `collect`."""
    never = ["torn", "wrong", "failed", "unreadable entries", "damaged blobs"]
    never += [] if collects else ["lost", "incomplete entries"]
    return not any(counts[name] for name in never)


def main() -> int:
    """Prints the counts of both halves. Returns 1 if one is not good."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lookups", type=int, default=10_000)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plant", action="store_true")
    parser.add_argument("--s3", action="store_true")
    arguments = parser.parse_args()
    if arguments.plant and arguments.s3:
        parser.error("--plant: only files of a folder can be written in place")
    good = True
    for collects in (False, True):
        start = time.monotonic()
        counts = phase(
            arguments.lookups // 2, arguments.processes, arguments.seed, arguments.plant, collects,
            arguments.s3,
        )  # fmt: skip
        good = good and is_good(counts, collects)
        facts = {"collect": collects, "seconds": round(time.monotonic() - start), **counts}
        print(json.dumps(facts), flush=True)
    print("no torn and no wrong lookup" if good else "FAULTS")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
