"""Locks: held by one process, free after it in any way it ends, and no file left."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.commands.tune.tune import _work_folder
from pipeline.errors import InputError
from pipeline.machine.lock import Taken, free, take

TAKEN_BY_OTHER = """
import sys, time
from pathlib import Path
from pipeline.machine.lock import take
lock = take(Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_only_one_holds_it(file: Path) -> None:
    lock = take(file)
    with pytest.raises(Taken):
        take(file)
    free(lock)
    assert not file.exists()
    free(lock)  # once more is harmless
    other = take(file)
    free(lock)  # also while another one holds it
    with pytest.raises(Taken):
        take(file)
    free(other)


def test_a_killed_holder_frees_it_and_a_living_one_does_not(file: Path) -> None:
    words = [sys.executable, "-c", TAKEN_BY_OTHER, str(file)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "ready\n"
            start = time.monotonic()
            with pytest.raises(Taken):
                take(file)
            assert time.monotonic() - start < 5
        finally:
            other.kill()
    assert file.exists()
    free(take(file))
    assert not file.exists()


def test_another_thread_can_free_it(file: Path) -> None:
    """The thread that ends the program at a signal does so."""
    lock = take(file)
    thread = threading.Thread(target=free, args=(lock,))
    thread.start()
    thread.join()
    free(take(file))


def test_no_link_is_followed(file: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years of work")
    file.symlink_to("precious")
    with pytest.raises(OSError):
        take(file)
    assert (tmp_path / "precious").read_text() == "years of work"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="no folder refuses files")
def test_a_file_that_cannot_be_made_is_not_taken() -> None:
    with pytest.raises(FileNotFoundError):
        take(Path("/proc/.x.lock"))


def test_a_second_tune_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "raft"
    with _work_folder(place) as folder:
        (folder / "trials.json").touch()
        with pytest.raises(InputError, match="another tune of it is running"), _work_folder(place):
            pass
    assert [entry.name for entry in folder.iterdir()] == ["trials.json"]
    (folder / "trials.json").unlink()
    with _work_folder(place):
        pass
    assert list(tmp_path.iterdir()) == []
