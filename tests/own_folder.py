"""Writes a user's folder from the listings of documentation pages, and runs `valkyrie-train` with it."""

from __future__ import annotations

import re
import subprocess
import sys
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


def train_with(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `valkyrie-train --config-dir FOLDER` in a subprocess, in the parent directory of the folder."""
    command = [sys.executable, "-m", "valkyrie.cli.train", "--config-dir", str(folder), *arguments]
    return subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=300)
