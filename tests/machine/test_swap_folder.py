"""Replacing a folder with real processes: killed, interrupted, out of space, contended."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import InputError, PipelineError
from pipeline.machine import swap_folder as _folder
from pipeline.machine.files import fresh
from pipeline.machine.swap_folder import LINK_FROM_BYTES, replacing

ROOT = Path(__file__).resolve().parents[2]
MARKER = "manifest.json"
BIG = LINK_FROM_BYTES
NOBODY = 65534


def write(path: Path, text: str, *, keep: bool = False) -> None:
    with replacing(path, keep=keep) as staging:
        fresh(staging / MARKER).write_text(text)
        fresh(staging / "sub" / "data").write_text(text)


def assert_holds(path: Path, text: str) -> None:
    assert (path / MARKER).read_text() == text
    assert (path / "sub" / "data").read_text() == text


def assert_alone(path: Path) -> None:
    """Checks that the folder's parent has no other entries."""
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


PRELUDE = """
    import errno, os, sys, time
    import filelock
    from pathlib import Path
    from pipeline.machine import swap_folder as _folder
    from pipeline.machine.files import fresh
    from pipeline.machine.swap_folder import replacing
    from pipeline.errors import PipelineError

    def write(path, text, keep=False):
        with replacing(path, keep=keep) as staging:
            fresh(staging / "manifest.json").write_text(text)
            fresh(staging / "sub" / "data").write_text(text)

    def pause(*_):
        print("ready", flush=True)
        time.sleep(60)

    path = Path(sys.argv[1])
"""


def start(code: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(code), str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_and_wait(code: str, path: Path) -> subprocess.Popen[str]:
    """Starts the code, and returns when it has reached `pause`."""
    child = start(code, path)
    assert child.stdout is not None
    line = child.stdout.readline()
    if line != "ready\n":
        child.kill()
        pytest.fail(child.communicate()[1])
    return child


def end(child: subprocess.Popen[str], sent: signal.Signals) -> str:
    child.send_signal(sent)
    return child.communicate(timeout=30)[1]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "parent" / "raft"


@pytest.fixture
def no_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_folder, "_find_exchange", lambda: None)


@pytest.fixture
def foreign_parent() -> Iterator[Path]:
    """A folder that we may not write to, and that every user can enter."""
    parent = Path(tempfile.mkdtemp())
    parent.chmod(0o755)
    yield parent
    shutil.rmtree(parent)


def test_new_and_replaced(place: Path) -> None:
    write(place, "one")
    assert_holds(place, "one")
    write(place, "two")
    assert_holds(place, "two")
    assert_alone(place)


def test_an_empty_folder_is_filled(place: Path) -> None:
    place.mkdir(parents=True)
    write(place, "one")
    assert_holds(place, "one")


def test_without_keep_the_old_files_are_gone(place: Path) -> None:
    write(place, "one")
    (place / "more").touch()
    write(place, "two")
    assert not (place / "more").exists()


def test_the_mode_stays(place: Path) -> None:
    write(place, "one")
    place.chmod(0o750)
    write(place, "two")
    assert place.stat().st_mode & 0o777 == 0o750


def test_keep_links_large_files_and_copies_small_ones(place: Path) -> None:
    with replacing(place, keep=False) as staging:
        (staging / MARKER).write_text("one")
        (staging / "large").write_bytes(bytes(BIG))
        (staging / "empty folder").mkdir()
        (staging / "link").symlink_to("large")
        (staging / "folder link").symlink_to("empty folder")
    inodes = {name: (place / name).stat().st_ino for name in (MARKER, "large")}
    with replacing(place, keep=True) as staging:
        assert (staging / "large").stat().st_ino == inodes["large"]
        assert (staging / MARKER).stat().st_ino != inodes[MARKER]
        assert (staging / "empty folder").is_dir()
        assert (staging / "link").readlink() == Path("large")
        assert (staging / "folder link").readlink() == Path("empty folder")
    assert (place / "large").stat().st_size == BIG


def test_keep_copies_where_no_link_can_be_made(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Path) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    with replacing(place, keep=False) as staging:
        (staging / MARKER).write_text("one")
        (staging / "large").write_bytes(b"x" * BIG)
    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with replacing(place, keep=True):
        pass
    assert (place / "large").read_bytes() == b"x" * BIG


def test_fresh_leaves_the_old_file_alone(place: Path) -> None:
    with replacing(place, keep=False) as staging:
        (staging / MARKER).write_text("one")
        (staging / "large").write_bytes(b"old" * BIG)
    with pytest.raises(ZeroDivisionError), replacing(place, keep=True) as staging:
        fresh(staging / "large").write_bytes(b"new" * BIG)
        raise ZeroDivisionError
    assert (place / "large").read_bytes() == b"old" * BIG


def test_writing_a_linked_file_in_place_is_noticed(place: Path) -> None:
    with replacing(place, keep=False) as staging:
        (staging / MARKER).write_text("one")
        (staging / "large").write_bytes(bytes(BIG))
    with (
        pytest.raises(RuntimeError, match=r"large was written in place; use fresh\(\)"),
        replacing(place, keep=True) as staging,
        (staging / "large").open("ab") as file,
    ):
        file.write(b"more")
    assert_alone(place)


def test_a_block_without_marker_changes_nothing(place: Path) -> None:
    write(place, "one")
    with (
        pytest.raises(RuntimeError, match=r"holds no manifest\.json"),
        replacing(place, keep=False),
    ):
        pass
    assert_holds(place, "one")
    assert_alone(place)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_exception_changes_nothing(place: Path, error: type[BaseException]) -> None:
    write(place, "one")
    with pytest.raises(error), replacing(place, keep=True) as staging:
        fresh(staging / MARKER).write_text("two")
        raise error
    assert_holds(place, "one")
    assert_alone(place)


def test_paths_in_other_forms(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.parent.mkdir()
    monkeypatch.chdir(place.parent)
    write(Path("raft"), "one")
    write(Path("../parent/./raft/"), "two")
    assert_holds(place, "two")
    assert_alone(place)


def test_a_links_target_is_replaced(place: Path, tmp_path: Path) -> None:
    write(place, "one")
    link = tmp_path / "latest"
    link.symlink_to("parent/raft")
    write(link, "two")
    assert link.is_symlink()
    assert_holds(place, "two")


def test_a_dangling_link_gets_its_target(place: Path, tmp_path: Path) -> None:
    link = tmp_path / "latest"
    link.symlink_to("parent/raft")
    write(link, "one")
    assert link.is_symlink()
    assert_holds(place, "one")


def test_names_that_look_like_patterns_or_like_each_other(tmp_path: Path) -> None:
    for name in ("[a]*", "a", "a.tmp-1", ".a"):
        write(tmp_path / name, name)
    other = tmp_path / ".a.tmp-1.tmp-2-0123abcd"  # belongs to a.tmp-1, not to a
    other.mkdir()
    write(tmp_path / "a", "two")
    assert other.is_dir()
    for name in ("[a]*", "a.tmp-1", ".a"):
        assert_holds(tmp_path / name, name)


# refusals


def test_a_foreign_folder_is_left_alone(place: Path) -> None:
    place.mkdir(parents=True)
    (place / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match=r"has files but no manifest\.json"):
        write(place, "one")
    assert (place / "thesis.tex").read_text() == "years of work"
    assert_alone(place)


def test_a_foreign_folder_that_came_meanwhile_is_left_alone(place: Path) -> None:
    with pytest.raises(InputError, match="stays as it is"), replacing(place, keep=False) as staging:
        (staging / MARKER).touch()
        place.mkdir()
        (place / "thesis.tex").touch()
    assert (place / "thesis.tex").exists()
    assert_alone(place)


def test_a_file_in_the_way(place: Path) -> None:
    place.parent.mkdir()
    place.write_text("a file")
    with pytest.raises(InputError, match="is not a folder"):
        write(place, "one")
    with pytest.raises(InputError, match="can't be written"):
        write(place / "below", "one")
    assert place.read_text() == "a file"


def test_a_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(InputError):
        write(tmp_path / "loop", "one")


def test_a_name_too_long(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="File name too long"):
        write(tmp_path / ("x" * 250), "one")


def test_a_mount_point() -> None:
    with pytest.raises(InputError, match="is a mount point"):
        write(Path("/proc"), "one")


def test_the_current_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place, "one")
    monkeypatch.chdir(place / "sub")
    for path in (Path(".."), Path(), place):
        with pytest.raises(InputError, match="is or holds the current folder"):
            write(path, "two")
    assert_holds(place, "one")


def test_no_permission(foreign_parent: Path) -> None:
    if os.getuid() != 0:
        foreign_parent.chmod(0o555)
    become = f"os.setuid({NOBODY})" if os.getuid() == 0 else ""
    # imports first, because the other user may not be able to read this tree
    code = f"""
    {become}
    try:
        write(path, "one")
    except PipelineError as error:
        print(error.exit_code, error)
    """
    out, err = start(code, foreign_parent / "raft").communicate(timeout=30)
    assert err == ""
    assert out.startswith(f"2 {foreign_parent}/raft: can't be written: Permission denied")
    assert out.count("\n") == 1
    foreign_parent.chmod(0o755)
    assert list(foreign_parent.iterdir()) == []


def mounted(folder: Path, kind: str) -> bool:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", kind, "pipeline-test", str(folder)]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    if not mounted(folder, "size=4m"):
        pytest.skip("may not mount a tmpfs here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_disk(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(InputError, match="Read-only file system"):
        write(small_disk / "raft", "one")


@pytest.mark.parametrize("existed", [False, True])
def test_a_full_disk(small_disk: Path, existed: bool) -> None:
    path = small_disk / "raft"
    if existed:
        write(path, "one")
    said = "the previous artifact is untouched" if existed else "nothing is left behind"
    with pytest.raises(PipelineError, match=f"no space left.*{said}") as caught:  # noqa: SIM117
        with replacing(path, keep=True) as staging:
            (staging / "large").write_bytes(bytes(5 << 20))
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    assert [entry.name for entry in small_disk.iterdir()] == ["raft"] * existed
    if existed:
        assert_holds(path, "one")


def test_a_file_size_limit(place: Path) -> None:
    write(place, "one")
    code = """
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    try:
        write(path, "x" * 5000)
    except PipelineError as error:
        print(error.exit_code, error)
    """
    out, err = start(code, place).communicate(timeout=30)
    assert err == ""
    assert out.startswith(f"1 {place}: no space left (File too large); the previous artifact is")
    assert_holds(place, "one")
    assert_alone(place)


# killed and contended


def test_killed_while_writing(place: Path) -> None:
    write(place, "one")
    code = """
    with replacing(path, keep=True) as staging:
        fresh(staging / "manifest.json").write_text("tw")
        pause()
    """
    end(start_and_wait(code, place), signal.SIGKILL)
    assert_holds(place, "one")
    assert (
        len(list(place.parent.iterdir())) == 3
    )  # the folder, its lock, and the unfinished new folder
    write(place, "three")
    assert_holds(place, "three")
    assert_alone(place)


def test_killed_before_the_first_was_done(place: Path) -> None:
    end(start_and_wait("with replacing(path, keep=True): pause()", place), signal.SIGKILL)
    assert not place.exists()
    write(place, "one")
    assert_alone(place)


def test_ctrl_c(place: Path) -> None:
    write(place, "one")
    code = """
    with replacing(path, keep=False) as staging:
        fresh(staging / "manifest.json").write_text("two")
        pause()
    """
    assert "KeyboardInterrupt" in end(start_and_wait(code, place), signal.SIGINT)
    assert_holds(place, "one")
    assert_alone(place)


# where the child stops, with or without renameat2, and what the place then has
STEPS = {
    "before the exchange": ("_folder._exchange = pause", "one"),
    "after the exchange": (
        "_folder._sync_one, sync = lambda p: p == path.parent and pause(), 0",
        "two",
    ),
    "before the old is aside": ("_folder._exchange = lambda *_: pause()", "one"),
    "between the renames": (
        """
        _folder._find_exchange = lambda: None
        rename = Path.rename
        def stopping(self, target):
            if target == path and '.tmp-' in self.name:
                pause()
            rename(self, target)
        Path.rename = stopping""",
        None,
    ),
    "after the renames": (
        """
        _folder._find_exchange = lambda: None
        _folder._sync_one = lambda p: p == path.parent and pause()""",
        "two",
    ),
}


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("step", STEPS)
def test_stopped_in_the_swap(place: Path, step: str, sent: signal.Signals) -> None:
    write(place, "one")
    code, there = STEPS[step]
    end(start_and_wait(textwrap.dedent(code) + '\nwrite(path, "two")', place), sent)
    if sent == signal.SIGINT:
        assert_holds(place, there or "one")
        assert_alone(place)
    elif there is None:
        assert not place.exists()
    else:
        assert_holds(place, there)
    # the next run repairs the leftovers before it fails itself
    with pytest.raises(ZeroDivisionError), replacing(place, keep=True) as staging:
        assert_holds(staging, there or "one")
        raise ZeroDivisionError
    assert_holds(place, there or "one")
    assert_alone(place)


def test_two_writers(place: Path) -> None:
    write(place, "one")
    child = start_and_wait("with replacing(path, keep=True): pause()", place)
    began = time.monotonic()
    with pytest.raises(InputError) as caught:
        write(place, "two")
    assert time.monotonic() - began < 5
    assert str(caught.value) == (
        f"{place}: another conversion is writing to it (pid {child.pid}); wait for it or stop it"
    )
    write(place.with_name("other"), "other")  # another place has no lock
    end(child, signal.SIGKILL)
    write(place, "two")
    assert_holds(place, "two")


def test_many_writers_at_once(place: Path) -> None:
    code = """
    done = 0
    for turn in range(60):
        try:
            write(path, f"{os.getpid()} {turn}", keep=True)
            done += 1
        except PipelineError as error:
            assert "another conversion" in str(error), error
    print(done)
    """
    children = [start(code, place) for _ in range(4)]
    done = 0
    for child in children:
        out, err = child.communicate(timeout=120)
        assert err == ""
        done += int(out)
    assert done > 0
    assert_holds(place, (place / MARKER).read_text())
    assert_alone(place)


def test_the_lock_is_free_after_the_block_even_if_a_child_lives(place: Path) -> None:
    code = """
    with replacing(path, keep=True) as staging:
        fresh(staging / "manifest.json").write_text("one")
        if os.fork() == 0:
            time.sleep(5)
            os._exit(0)
    write(path, "two")
    print("both")
    """
    child = start(code, place)
    assert child.stdout is not None
    assert child.stdout.readline() == "both\n"
    child.communicate(timeout=30)


# without renameat2


@pytest.mark.usefixtures("no_exchange")
def test_without_exchange(place: Path) -> None:
    write(place, "one")
    write(place, "two", keep=True)
    assert_holds(place, "two")
    assert_alone(place)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_exchange(
    place: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exchange(*_: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(_folder, "_find_exchange", lambda: exchange)
    write(place, "one")
    write(place, "two")
    assert_holds(place, "two")
    assert_alone(place)


@pytest.mark.usefixtures("no_exchange")
def test_the_second_rename_fails(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(place, "one")
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise PermissionError(errno.EACCES, "not today", str(self))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(InputError, match="not today"):
        write(place, "two")
    assert_holds(place, "one")
    assert_alone(place)


def test_an_old_folder_is_never_removed_for_a_foreign_one(place: Path) -> None:
    """A kill between the renames; then the user makes a folder of that name."""
    old = place.with_name(".raft.old-1-0123abcd")
    write(place, "one")
    place.rename(old)
    place.mkdir()
    (place / "notes").touch()
    with pytest.raises(InputError, match="stays as it is"):
        write(place, "two")
    assert_holds(old, "one")
    (place / "notes").unlink()
    write(place, "two", keep=True)  # the old one is back, and replaced
    assert_alone(place)


@pytest.mark.skipif(sys.platform != "linux", reason="renameat2 is Linux's")
def test_linux_exchanges() -> None:
    assert _folder._find_exchange() is not None
