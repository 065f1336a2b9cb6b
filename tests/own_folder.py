"""Writes a user's folder from the listings of documentation pages, and runs `valkyrie-train` with it."""

from __future__ import annotations

import atexit
import json
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path


def write_listings(folder: Path, *pages: Path, name: str = r"\S+") -> list[str]:
    """Write the listings of `pages` that begin with the comment `# FOLDER/NAME` to files `NAME` in `folder`.

    Skips names that do not match the regex `name`. Returns the sorted names of the files.
    """
    listings = re.findall(
        rf"```(?:python|yaml)\n# FOLDER/({name})\n(.*?)```", "\n".join(page.read_text() for page in pages), re.DOTALL
    )
    for file_name, body in listings:
        (folder / file_name).parent.mkdir(exist_ok=True)
        (folder / file_name).write_text(body)
    return sorted(file_name for file_name, _ in listings)


_SERVER = """
import json, os, sys
import flax, jax, optax, orbax.checkpoint, valkyrie.cli.dispatch, valkyrie.train.modes, valkyrie.train.trainer

threads = "/proc/self/task"  # of Linux; only the thread that forks exists in the fork
assert not os.path.isdir(threads) or len(os.listdir(threads)) == 1
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(request["cwd"])
os.environ.clear()
os.environ.update(request["environment"])
for number, file in enumerate([os.devnull, request["out"], request["err"]]):
    os.dup2(os.open(file, os.O_RDWR), number)
sys.argv, sys.path[0] = ["valkyrie-train", *request["arguments"]], request["cwd"]
from valkyrie.cli.train import main
main()
"""
"""Program that runs `valkyrie-train` once for each line of its input, in a fork, and prints the exit status.

The fork has the imports already, which take 2 s of a command.
"""


@cache
def _start_server() -> subprocess.Popen[str]:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a process with threads cannot be forked safely
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    atexit.register(server.communicate)  # it ends with its input
    return server


def train_with(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `valkyrie-train --config-dir FOLDER` in another process, in the parent directory of the folder."""
    server, command = _start_server(), ["--config-dir", str(folder), *arguments]
    assert server.stdin is not None and server.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        request = {"cwd": str(folder.parent), "environment": dict(os.environ), "arguments": command}
        print(json.dumps({**request, "out": out.name, "err": err.name}), file=server.stdin, flush=True)
        status = server.stdout.readline()
        assert status, "the process that runs commands has ended"
        return subprocess.CompletedProcess(command, int(status), out.read(), err.read())
