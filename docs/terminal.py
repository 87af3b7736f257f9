"""Records commands in a terminal of 80 columns, for the docs.

    python docs/terminal.py [NAME ...]

Writes docs/guide/terminal/NAME.cast, which ``asciinema play`` shows as it ran (asciicast v2), and
NAME.svg, a picture of the same command on a terminal without colours and moving lines.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent / "guide" / "terminal"
COLUMNS, LINES = 80, 40
MODEL = """import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.down = torch.nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.up = torch.nn.Conv2d(16, 12, 3, padding=1)

    def forward(self, x):
        y = torch.nn.functional.instance_norm(self.down(x))
        y = torch.nn.functional.pixel_shuffle(self.up(y.relu()), 2)
        return x + y

def net():
    return Net().eval()
"""
SIZES = "--input 'x:{b}x3x{h}x{w}' --dim b=1:4 --dim h=64:512"
COMMANDS: Mapping[str, str] = {
    "help": "pipeline",
    "convert-help": "pipeline convert --help",
    "convert": f"pipeline convert net.py:net {SIZES} --dim w=64:512",
    "refused": f"pipeline convert net.py:net {SIZES} --dim w=64:512 --exact-dims",
    "wrong-word": "pipeline convrt net.py:net",
}


def main() -> None:
    HERE.mkdir(exist_ok=True)
    for name in sys.argv[1:] or COMMANDS:
        moving = list(run(COMMANDS[name], "xterm-256color"))
        plain = "".join(text for _, text in run(COMMANDS[name], "dumb"))
        head = {"version": 2, "width": COLUMNS, "height": LINES, "title": COMMANDS[name]}
        events = [[round(seconds, 2), "o", text] for seconds, text in moving]
        lines = [json.dumps(line) for line in [head, *events]]
        (HERE / f"{name}.cast").write_text("\n".join([*lines, ""]))
        (HERE / f"{name}.svg").write_text(picture(COMMANDS[name], plain))
        print(HERE / name)


def run(command: str, terminal: str) -> Iterator[tuple[float, str]]:
    """Runs a command in a pseudo-terminal; gives what it prints, with the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "net.py").write_text(MODEL)
        for seconds, text in _run(command, folder, terminal):
            yield seconds, text.replace(f"{folder}/", "")


def _run(command: str, folder: str, terminal: str) -> Iterator[tuple[float, str]]:
    pid, file = pty.fork()
    if pid == 0:
        os.chdir(folder)
        programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        os.environ.update(TERM=terminal, COLUMNS=str(COLUMNS), PATH=programs)
        os.execv("/bin/sh", ["sh", "-c", command])
    fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    start = time.monotonic()
    yield 0.0, f"$ {command}\r\n"
    while True:
        try:
            part = os.read(file, 65536)
        except OSError:  # the command has ended
            break
        if not part:
            break
        yield time.monotonic() - start, part.decode(errors="replace")
    os.waitpid(pid, 0)
    os.close(file)


def picture(title: str, text: str) -> str:
    """The text as an SVG of a terminal."""
    from rich.console import Console
    from rich.text import Text

    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=COLUMNS, file=nowhere)
        console.print(Text(text.replace("\r\n", "\n").rstrip()))
        return console.export_svg(title=title, unique_id="terminal")


if __name__ == "__main__":
    main()
