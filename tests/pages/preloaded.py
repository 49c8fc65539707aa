"""The command `consilium` without the seconds of loading libraries: a process that has them loaded forks for each call.

    python preloaded.py serve SOCKET         load, then run the calls that come
    python -S preloaded.py call SOCKET ...   run `consilium ...` in a fork: same folder, environment, files, exit code

The package is that of PYTHONPATH, and each command a process of its own. Once a file of the package has changed, as the recipes
change it, commands start without anything loaded.
"""

import gc
import json
import os
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages


def call(path: str, words: list[str]) -> int:
    """Run a command in a fork of the server; return its exit code."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        asked = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(server, [len(asked).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(asked)
        return int(server.recv(8))


def serve(path: str) -> None:
    """Answer calls; return in the fork that is to run a command, with words, folder, environment and files of its caller."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(8)
        answered = 0
        while True:
            calling, _ = listening.accept()
            while answered and os.waitpid(-1, os.WNOHANG)[0]:
                answered -= 1
            with calling:
                answered += 1
                if os.fork() == 0:
                    running = os.fork()
                    if not running:
                        _take_over(calling)
                        return
                    _, status = os.waitpid(running, 0)
                    calling.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                    os._exit(0)


def _take_over(calling: socket.socket) -> None:
    size, files, _, _ = socket.recv_fds(calling, 4, 3)
    for ours, theirs in enumerate(files):
        os.dup2(theirs, ours)
        os.close(theirs)
    words, folder, environment = json.loads(calling.recv(int.from_bytes(size, "big"), socket.MSG_WAITALL))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["consilium", *words]
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")


def main() -> None:
    """Be the server or a call."""
    what, path, *words = sys.argv[1:]
    if what == "call":
        raise SystemExit(call(path, words))
    import consilium
    from consilium.cli.main import main as command

    for name in [*LIBRARIES, *(found.name for found in walk_packages(consilium.__path__, "consilium."))]:
        with suppress(ImportError):  # of an extra that is not there
            import_module(name)
    gc.freeze()
    loaded = _sources(consilium.__path__[0])
    serve(path)
    if _sources(consilium.__path__[0]) != loaded:
        os.execv(sys.executable, [sys.executable, "-c", "from consilium.cli.main import main; main()", *sys.argv[1:]])
    command()


def _sources(package: str) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in Path(package).rglob("*.py")}


LIBRARIES = ("torch", "monai.inferers", "transformers", "peft", "matplotlib.pyplot", "nvflare.client")
if __name__ == "__main__":
    main()
