"""Finds families by name. A family is a Python module that defines a model, data source, task, optimizer or mode.

Launch engines are found in the same way. A module ships with Valkyrie or is in a folder of the user. Users pass their
module folders with `--config-dir` or `modules=`, and the run folder records them. Code from a recorded folder is
imported only if a command on this machine has named that folder.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TypeVar

from valkyrie.hooks import check_hooks
from valkyrie.paths import cache_root, read_defaults
from valkyrie.problems import MisuseError

_PACKAGE, _STDLIB = Path(__file__).resolve().parent, Path(os.__file__).resolve().parent

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Environment variable that makes Hydra raise its errors. If the user sets it to 1, we show tracebacks."""
TRACEBACK_HINT = f"({FULL_ERROR}=1 shows the traceback)"
_MODULES_VARIABLE = "VALKYRIE_MODULES"
"""Environment variable that passes the folders of `modules=` and `--config-dir` to child processes."""


Item = TypeVar("Item")


@dataclass(frozen=True)
class Families:
    """The modules that `KEY=NAME` can select. Each defines a dataclass `Config`.

    A name refers to a module in `package`, or else to any importable module, such as one in the folder of
    `--config-dir`.

    Args:
        key: config key that selects a family, such as `optimizer.family`.
        package: package with the families that ship with Valkyrie.
        base: base class of every `Config`.
        interface: protocol that a `Config` without a base class of Valkyrie implements.
    """

    key: str
    package: str
    base: type = object
    interface: type = object

    def names(self) -> list[str]:
        """Return the names of the families that ship with Valkyrie."""
        return list(_shipped_families(self.package))

    def user_names(self) -> list[str]:
        """Return the names of the user's families: those with `NAME_schema` in the defaults list of a user's YAML."""
        return list(_user_families(self, tuple(sys.path)))

    def __contains__(self, name: str) -> bool:
        return name in self.names() or (name.isidentifier() and find_spec(name) is not None)

    def config_class(self, name: str) -> type:
        """Import a family and return its `Config` class.

        Raises ValueError if there is no such module, it cannot be imported or would be ignored, or its `Config` is
        missing, does not derive from `base`, lacks a method of `base`, has a field with the name of a method, has
        fields but no `@dataclass`, or has a method with a wrong signature (`check_hooks`). Does not check families that
        ship with Valkyrie.
        """
        if name in self.names():
            return import_module(f"{self.package}.{name}").Config
        self.refuse_ignored_module(name)
        if name not in self:
            raise ValueError(
                f"{self.key}={name} is unknown. Use one of {', '.join(self.names())}, or the name of a Python module "
                "in the folder of --config-dir."
            )
        config_class = getattr(self._import(name), "Config", None)
        base_name = f"{self.base.__module__}.{self.base.__name__}"
        if not isinstance(config_class, type):
            definition = f", derived from {base_name}" if self.base is not object else ""
            raise ValueError(f"{self.key}={name}: the module {name} has no class Config. Define one{definition}.")
        if not issubclass(config_class, self.base):
            raise ValueError(f"{self.key}={name}: the class Config of the module {name} must derive from {base_name}.")
        annotations = inspect.get_annotations(config_class)
        if "__dataclass_fields__" not in vars(config_class) and not all(
            "ClassVar" in str(a) for a in annotations.values()
        ):
            raise ValueError(
                f"{self.key}={name}: the class Config of the module {name} has annotated fields, but no @dataclass. "
                "Write @dataclass before it."
            )
        if missing := sorted(getattr(config_class, "__abstractmethods__", ())):
            raise ValueError(
                f"{self.key}={name}: the class Config of the module {name} does not define {', '.join(missing)}, which "
                f"{base_name} requires."
            )
        for field_name in getattr(config_class, "__dataclass_fields__", {}):
            if owner := next((c for c in config_class.__mro__ if callable(vars(c).get(field_name))), None):
                raise ValueError(
                    f"{self.key}={name}: the class Config of the module {name} has a field {field_name}, which is a "
                    f"method of {owner.__module__}.{owner.__name__}. Rename the field."
                )
        try:
            check_hooks(config_class, self.setting, self.interface)
        except ValueError as error:
            raise ValueError(f"{self.key}={name}: {error}") from error
        return config_class

    def refuse_ignored_module(self, name: str) -> None:
        """Raise ValueError if a folder in `VALKYRIE_MODULES` has a module `name` that would be ignored.

        Importing `name` ignores that module if a shipped family or another Python module has the same name, or if
        `name` is not an identifier.
        """
        names = (f"{name}.py", f"{name}/__init__.py")
        files = [file for folder in _command_folders() for file in (Path(folder, n) for n in names) if file.is_file()]
        if not files:
            return
        new_name = re.sub(r"\W", "_", name) if not name.isidentifier() else f"my_{name}"
        if name in self.names():
            reason = f"{self.key}={name} ships with Valkyrie"
        elif not name.isidentifier():
            reason = f"{name} is not the name of a Python module (letters, digits and _)"
        elif (spec := find_spec(name)) and Path(spec.origin or "").resolve() not in map(Path.resolve, files):
            reason = f"Python has another module named {name} ({spec.origin})"
        else:
            return
        raise ValueError(
            f"{self.key}={name}: {files[0]} would be ignored, because {reason}. Rename it, for example to {new_name}, "
            f"and use {self.key}={new_name}."
        )

    @property
    def field_name(self) -> str:
        """Name of the `Config` field that holds the name of the family, such as `family` for `optimizer.family`."""
        return self.key.rpartition(".")[2]

    def setting(self, config: object) -> str:
        """Return the setting that selects a user's `Config` or an instance of it, such as `optimizer.family=lion`."""
        return f"{self.key}={config.__module__ if isinstance(config, type) else getattr(config, self.field_name)}"

    def names_with_key(self, key: str) -> list[str]:
        """Return the names of all families, including the user's, with a key such as `repeats` or `sudoku.side`.

        Leaves out families whose module or `Config` cannot be used.
        """
        return [name for name in (*self.names(), *self.user_names()) if self._has_key(name, key)]

    def _has_key(self, name: str, key: str) -> bool:
        try:
            return has_key(self.config_class(name), key)
        except ValueError:
            return False

    def _import(self, name: str) -> ModuleType:
        """Import a user's module. Raises ValueError with the file, the line and the error if it cannot be imported."""
        try:
            return import_module(name)
        except MisuseError as error:  # of a class that derives from one of Valkyrie
            raise ValueError(f"{self.key}={name}: {error}") from error
        except (Exception, SystemExit) as error:
            spec = find_spec(name)
            # ValueError: Python before 3.11.4
            is_unreadable = isinstance(error, SyntaxError | ValueError)
            if is_unreadable and spec and b"\0" in Path(spec.origin or os.devnull).read_bytes():
                raise ValueError(
                    f"{self.key}={name} cannot be imported: {spec.origin} is UTF-16 or binary, not UTF-8. Save it as "
                    "UTF-8."
                ) from error
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename[:1] != "<"]
            frames = [frame for frame in frames if not _is_package_file(frame.filename)] or frames
            if folder := self.user_folder(name):  # not a line of a library that the module calls
                frames = [frame for frame in frames if Path(frame.filename).is_relative_to(folder)] or frames
            file, line = frames[-1].filename, frames[-1].lineno
            if isinstance(error, SyntaxError) and error.filename:
                file, line = error.filename, error.lineno
            reason = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
            raise ValueError(f"{self.key}={name} cannot be imported: {file}, line {line}: {reason}.") from error

    def user_folder(self, name: str) -> Path | None:
        """Return the folder that contains a user's module or package.

        Returns None for a family that ships with Valkyrie or if there is no module.
        """
        spec = None if name in self.names() else find_spec(name)
        if spec is None or spec.origin is None:
            return None
        file = Path(spec.origin).resolve()
        return file.parent.parent if spec.submodule_search_locations else file.parent

    def source_paths(self, name: str) -> list[Path]:
        """Return the file or package folder of a user's module, and of those that it imports from the user's folders.

        Follows imports in these modules too. Libraries, and modules that ship with Valkyrie, are left out.
        """
        own_folder = self.user_folder(name)
        folders = [own_folder, *map(Path, _command_folders())] if own_folder is not None else []
        paths, names = list[Path](), [name]
        for module_name in names:  # grows by the names of imported modules
            for folder in folders:
                is_library = module_name == _PACKAGE.name or (module_name != name and "site-packages" in folder.parts)
                package, file = folder / module_name, folder / f"{module_name}.py"
                is_package = (package / "__init__.py").is_file() or _is_namespace_package(package)
                path = package if is_package else file
                if is_library or path in paths or not path.exists():
                    continue
                paths.append(path)
                for module in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                    names += _imported_names(module)
        return paths


def _is_namespace_package(folder: Path) -> bool:
    """Return whether importing the name of `folder` imports a package without `__init__.py` that has this folder."""
    spec = find_spec(folder.name) if folder.is_dir() else None
    folders = (spec.submodule_search_locations if spec and spec.origin is None else None) or ()
    return os.path.realpath(folder) in map(os.path.realpath, folders)


def _imported_names(file: Path) -> Iterator[str]:
    """Yield the first part of the name of each module that a file imports, except relative imports."""
    with contextlib.suppress(SyntaxError, ValueError):  # a file that nothing imports may be no Python
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                yield node.module.partition(".")[0]


def module_names(folder: Path) -> list[str]:
    """Return the sorted names of the Python modules and packages in a folder."""
    packages = (file.parent for file in folder.glob("*/__init__.py"))
    return sorted(path.stem for path in (*folder.glob("*.py"), *packages))


def add_import_path(folders: Iterable[str | Path]) -> None:
    """Append the user's folders of modules to `sys.path`, and to `VALKYRIE_MODULES`, which child processes inherit."""
    for folder in map(str, folders):
        if folder not in sys.path:
            sys.path.append(folder)
        if os.path.realpath(folder) not in (folders_so_far := _command_folders()):
            os.environ[_MODULES_VARIABLE] = os.pathsep.join([*folders_so_far, os.path.realpath(folder)])


def remember_modules(folders: Iterable[str]) -> None:
    """Record folders of modules that a run on this machine uses, for `check_modules`."""
    new_folders = sorted({os.path.realpath(folder) for folder in folders} - {*_remembered_folders()})
    with contextlib.suppress(OSError):  # without a cache folder, later commands have to name them again
        if new_folders:
            cache_root().mkdir(parents=True, exist_ok=True)
            with _remembered_file().open("a") as file:
                file.writelines(f"{folder}\n" for folder in new_folders)


def check_modules(folders: Sequence[str], file: Path) -> None:
    """Raise ValueError if one of `folders` has not been named by any command on this machine.

    `folders` are the module folders that `file`, such as the `run.yaml` of a run, records.
    """
    trusted = {*_command_folders(), *_remembered_folders()}
    if untrusted_folders := [folder for folder in folders if os.path.realpath(folder) not in trusted]:
        folders_text = "that folder" if len(untrusted_folders) == 1 else "these folders"
        raise ValueError(
            f"{file} imports Python modules from {', '.join(untrusted_folders)}, but no command on this machine has "
            f"named {folders_text} yet. If you trust the code, add 'modules=[{','.join(untrusted_folders)}]', or set "
            f"{_MODULES_VARIABLE}={os.pathsep.join(untrusted_folders)}."
        )


def _command_folders() -> list[str]:
    return [folder for folder in os.environ.get(_MODULES_VARIABLE, "").split(os.pathsep) if folder]


def _remembered_folders() -> list[str]:
    with contextlib.suppress(OSError):
        return _remembered_file().read_text().splitlines()
    return []


def _remembered_file() -> Path:
    return cache_root() / "modules.txt"


def describe_user_error(error: BaseException) -> str | None:
    """Return `FILE, line N, in FUNCTION: TypeError: TEXT` if a user's module caused an error, or else None.

    An error that a library raises in a call from a user's module is the user's, and so is MisuseError. An error of a
    `raise` statement of Valkyrie in such a call is Valkyrie's, and so is any other error than ValueError in its lines.
    OSError in a library is Valkyrie's if Valkyrie called that library.
    """
    frames = traceback.extract_tb(error.__traceback__) if isinstance(error, Exception) else []
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    user_notes = [note for note in notes if not note.startswith("---")]
    if frames and not isinstance(error, MisuseError) and _is_package_file(frames[-1].filename):
        # JAX removes its own frames and adds a note, so the last frame may be a call to JAX.
        is_raised_by_library = len(user_notes) < len(notes) or isinstance(error, ValueError)
        if (frames[-1].line or "").startswith("raise ") or not is_raised_by_library:
            return None
    own_files = [frame.filename for frame in frames if is_own_file(frame.filename)]
    if isinstance(error, OSError) and own_files and _is_package_file(own_files[-1]):
        return None
    for frame in reversed(frames):
        if _is_user_file(Path(os.path.realpath(frame.filename))):
            text = "; ".join([str(error), *user_notes]).replace("\n", " ")
            kind = "" if isinstance(error, MisuseError) else f"{type(error).__name__}: "
            return f"{frame.filename}, line {frame.lineno}, in {frame.name}: {kind}{text}"
    return None


def is_own_file(filename: str) -> bool:
    """Return whether a file of a traceback belongs to Valkyrie or to a folder of the user's modules."""
    return _is_package_file(filename) or _is_user_file(Path(os.path.realpath(filename)))


def _is_package_file(filename: str) -> bool:
    return Path(os.path.realpath(filename)).is_relative_to(_PACKAGE)


def _is_user_file(file: Path) -> bool:
    is_library = "site-packages" in file.parts or any(file.is_relative_to(folder) for folder in (_PACKAGE, _STDLIB))
    return not is_library and any(file.is_relative_to(folder) for folder in _command_folders())


def has_key(config: object, key: str) -> bool:
    """Return whether a dataclass has a key. A dotted key such as `sudoku.side` is in the nested dataclass `sudoku`."""
    name, _, inner = key.partition(".")
    if not is_dataclass(config):
        return False
    groups = {field.name: field.default_factory for field in fields(config)}
    return name in groups and (not inner or has_key(groups[name], inner))


def refuse_earlier_names(cls: type, names: Mapping[str, str]) -> None:
    """Raise ValueError if a class defines a member under its old name, because nothing would call it.

    Members are methods, properties and class variables. Dataclass fields may use old names.

    Args:
        cls: The class, before it becomes a dataclass.
        names: Maps the old name of each renamed member to its current name.
    """
    annotations = vars(cls).get("__annotations__", {})
    for earlier_name, name in names.items():
        if earlier_name in vars(cls) and "ClassVar" in str(annotations.get(earlier_name, "ClassVar")):
            raise ValueError(f"{cls.__qualname__} defines {earlier_name}, which is now called {name}")


@cache
def _shipped_families(package: str) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in iter_modules(import_module(package).__path__)))


@cache
def _user_families(families: Families, path: tuple[str, ...]) -> tuple[str, ...]:
    group, shipped = families.key.partition(".")[0], families.names()
    files = [file for folder in path if folder for file in sorted((Path(folder) / group).glob("*.yaml"))]
    schemas = {entry for file in files for entry in read_defaults(file) if isinstance(entry, str)}
    names = {entry.removesuffix("_schema") for entry in schemas if entry.endswith("_schema")}
    return tuple(sorted(name for name in names if name not in shipped and name in families))
