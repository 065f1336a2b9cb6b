"""Data source for the source code of Python's standard library: about 12 MB, available without a download."""

from __future__ import annotations

import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from valkyrie.data.documents import CorpusConfig
from valkyrie.data.files import Listing, local_file, walk
from valkyrie.data.readers import SourceFile

MIN_BYTES = 1_000_000
# Tests are skipped: some installations lack them, and the corpus should be the same everywhere.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


@dataclass
class Config(CorpusConfig):
    """The .py files of Python's standard library, except its tests."""

    name: str = "stdlib"
    source: str = "stdlib"

    def list_files(self) -> Listing:
        """Return the source files of Python's standard library, from its folder or zip archives on `sys.path`.

        Raises ValueError if they have fewer than `MIN_BYTES` bytes in total, as in a Python that is installed without
        its source code.
        """
        root = Path(sysconfig.get_paths()["stdlib"])
        files: list[SourceFile] = []
        if (root / "os.py").is_file():
            for path in walk(root, lambda directory: directory in _SKIPPED_FOLDERS):
                if path.suffix == ".py":
                    files.append(local_file(path.relative_to(root).as_posix(), path))
        else:
            for archive in (Path(entry) for entry in sys.path if entry.endswith(".zip")):
                if archive.is_file():
                    files.extend(_list_zip(archive))
        files.sort(key=lambda file: file.id)
        size = sum(file.size for file in files)
        if size < MIN_BYTES:
            raise ValueError(
                f"data=stdlib found {len(files)} .py files with {size:,} bytes under {root} and on sys.path, but needs "
                f"{MIN_BYTES:,} bytes. This Python is installed without its source code. Use data=text "
                f"data.paths=[FILES], or data=synthetic."
            )
        return Listing(tuple(files))

    def cache_identity(self) -> dict[str, object]:
        return self.read_options.cache_identity


def _list_zip(archive: Path) -> Iterator[SourceFile]:
    mtime_ns = archive.stat().st_mtime_ns
    with zipfile.ZipFile(archive) as zip_file:
        for info in zip_file.infolist():
            if info.filename.endswith(".py") and not _SKIPPED_FOLDERS.intersection(Path(info.filename).parts):
                yield SourceFile(info.filename, archive, info.file_size, mtime_ns, info.filename)
