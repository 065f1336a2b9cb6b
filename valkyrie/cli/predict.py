"""`valkyrie-predict`: predicts the step time of any JAX program on a slice, from a function or a compiled module."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from valkyrie.cli.parser import OneLineParser, run_command
from valkyrie.paths import require_suffix
from valkyrie.problems import format_alternatives
from valkyrie.units import escape_control_characters

if TYPE_CHECKING:
    from valkyrie.hardware.position import Position
    from valkyrie.parallel.slice import Slice

NO_STEP_TIME = 3
"""Exit status if the program does not fit, or if its compile failed or exceeded the time limit."""

_VARIADIC_KINDS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def main(argv: Sequence[str] | None = None) -> None:
    """Run `valkyrie-predict` with `argv`, or with the arguments of the process if it is None."""
    run_command("valkyrie-predict", _predict, argv)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="valkyrie-predict",
        description="Predict the step time of a program on TPUs or GPUs, and which collectives it waits for.",
        epilog="Examples: valkyrie-predict train.py:step --target v5e-8; "
        "valkyrie-predict step.hlo --target h100-64 --mesh data=8,model=8",
    )
    parser.add_argument(
        "module",
        help="FILE.py:FUNCTION, where FUNCTION() or FUNCTION(slice) returns (jitted, arguments) or (jitted, arguments, "
        "keywords); or optimised HLO as text (*after_optimizations.txt) or as a proto (.hlo.pb)",
    )
    parser.add_argument(
        "--target",
        required=True,
        metavar="SLICE",
        help="slice to predict for, such as v4-64 or h100-64; for a compiled module, the slice it was compiled for",
    )
    parser.add_argument(
        "--slices", type=int, default=1, help="number of slices, connected by the data-centre network; default: 1"
    )
    parser.add_argument(
        "--mesh",
        help="mesh axes in order, such as data=8,model=4; for a compiled module, or a function without shardings",
    )
    parser.add_argument(
        "--places",
        type=Path,
        help="JSON file with a list of the positions of the mesh's devices, as slice:x,y,z:core; default: as placed by "
        "jax.experimental.mesh_utils; only for a compiled module",
    )
    parser.add_argument("--tokens", type=float, help="tokens per step, to report tokens per second")
    parser.add_argument("--unit", default="tokens", help="what --tokens counts, such as images; default: tokens")
    parser.add_argument("--flops", type=float, help="FLOPs of the model per step, to report MFU")
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="time limit of the compile of a function; default: none"
    )
    parser.add_argument("--timeline", type=Path, help="write the step as a timeline for https://ui.perfetto.dev")
    parser.add_argument("--html", type=Path, help="write the report as an HTML page")
    parser.add_argument("--json", type=Path, help="write the report as JSON")
    return parser


def _predict(words: list[str]) -> int:
    options = _parser().parse_args(words)
    _check_outputs(options)
    from valkyrie import api
    from valkyrie.paths import write_atomic
    from valkyrie.records import dump

    target = api.named_slice(options.target, slices=options.slices)
    mesh = None if options.mesh is None else parse_mesh_axes(options.mesh)
    settings = {"slice": target, "mesh": mesh, "tokens": options.tokens, "flops": options.flops, "unit": options.unit}
    file, function = split_function(options.module)
    if function is None:
        _require_file(file)
        if options.time_limit is not None:
            raise ValueError(
                f"--time-limit {options.time_limit:g}: {file} is already compiled, and the limit applies only to "
                "FILE.py:FUNCTION. Leave out --time-limit."
            )
        if mesh is None:
            raise ValueError("--mesh: name the mesh axes of a compiled module in order, such as --mesh data=8,model=4.")
        places = None if options.places is None else _read_places(options.places)
        result = api.predict(file, places=places, **settings)
    else:
        if options.places is not None:
            raise ValueError("--places is only for a compiled module. A function has its own mesh.")
        result = _predict_function(file, function, target, settings | {"time_limit_s": options.time_limit})
    sys.stdout.write(escape_control_characters(str(result)))
    if options.json is not None:
        write_atomic(options.json, dump(result.record), "--json FILE")
    if options.timeline is not None and result.status != "ok":
        reason = "does not fit" if result.status == "does_not_fit" else "was not compiled"
        print(f"no timeline, because the program {reason}")
    elif options.timeline is not None:
        print(f"timeline: {result.timeline(options.timeline)} (open it at https://ui.perfetto.dev)")
    if options.html is not None:
        print(f"page: {result.html(options.html)}")
    return 0 if result.status == "ok" else NO_STEP_TIME


def split_function(module: str) -> tuple[Path, str | None]:
    """Split `FILE.py:FUNCTION` into the file and the function's name. For a compiled module, the name is None.

    Raises ValueError for `FILE.py` without a function, for `FILE:FUNCTION` without the suffix `.py`, and for a function
    in a file that is not a Python file.
    """
    file, colon, function = module.rpartition(":")
    if colon and file.endswith(".py"):
        return Path(file), function
    if module.endswith(".py"):
        raise ValueError(f"{module}: name the function that returns the step and its arguments: {module}:step.")
    if colon and Path(f"{file}.py").is_file():
        raise ValueError(f"{module}: write the name of the file in full: {file}.py:{function}.")
    if colon and Path(file).is_file():
        raise ValueError(f"{module}: {file} is not a Python file. Name one: FILE.py:{function}.")
    return Path(module), None


def _predict_function(file: Path, function: str, target: Slice, settings: dict[str, Any]) -> Any:
    """Predict the program that a function in a Python file builds. Returns the `Result` of `valkyrie.predict`.

    Calls the function with the slice if it has a required argument, and otherwise without arguments. `settings` are
    keyword arguments of `valkyrie.predict`. Raises ValueError if the function is jitted or requires several arguments,
    or if the user's code fails.
    """
    from valkyrie import api
    from valkyrie.hardware.platforms import get_platform
    from valkyrie.runs.folder import package_versions

    for variable, value in get_platform(target.platform).compile_environment().items():
        os.environ.setdefault(variable, value)  # the file may use JAX when it is imported
    from valkyrie.search.programs import describe_error, explain_exit, find_user_line, parse_builder_result

    source = f"{file}:{function}"
    _require_file(file)
    with explain_exit(
        f"{file} ended while it was imported", 'Put the exiting call behind `if __name__ == "__main__":`.'
    ):
        try:
            module = _import_module(file)
        except Exception as error:  # of the user's code
            _raise_interrupt(error)
            hiding_files = {
                path: package
                for package in package_versions()
                for path in (file.with_name(f"{package}.py"), file.with_name(package) / "__init__.py")
            }
            advice = "".join(
                f". {path} hides the package {package}. Rename it."
                for path, package in hiding_files.items()
                if path.exists()
            )
            raise ValueError(f"{file} cannot be imported: {describe_error(error)}{advice}") from error
    build = _find_function(module, function, file)
    if hasattr(build, "lower"):
        raise ValueError(
            f"{source} is a jitted function. Name a function that returns it and its arguments: (step, (w, x))."
        )
    required_names = list[str]()
    with contextlib.suppress(TypeError, ValueError):  # of a function without a signature
        required_names = [
            parameter.name
            for parameter in inspect.signature(build).parameters.values()
            if parameter.default is parameter.empty and parameter.kind not in _VARIADIC_KINDS
        ]
    if len(required_names) > 1:
        raise ValueError(
            f"{source} requires the arguments {', '.join(required_names)}, but only the slice is passed to it. Give "
            "the other arguments default values."
        )
    with explain_exit(f"{source} ended the process", "Return the step and its arguments instead."):
        try:
            built = build(target) if required_names else build()
        except Exception as error:  # of the user's code
            _raise_interrupt(error)
            raise ValueError(f"{source}: {describe_error(error)}") from error
        call = parse_builder_result(built, source)
        name = getattr(call.function, "__name__", function)
        try:
            return api.predict(call.function, *call.arguments, **settings, name=name, **call.keywords)
        except Exception as error:  # of tracing the user's code
            _raise_interrupt(error)
            if isinstance(error, ValueError) and not find_user_line(error):  # of `predict` itself
                raise
            raise ValueError(f"{source}: {describe_error(error)}") from error


def _raise_interrupt(error: BaseException) -> None:
    """Raise KeyboardInterrupt if Ctrl-C caused an error. C extensions turn it into ImportError."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        cause = cause.__cause__ or cause.__context__


def _require_file(file: Path) -> None:
    """Raise FileNotFoundError or IsADirectoryError if there is no such file. A pipe is a file."""
    if file.is_dir() or not file.exists():
        error = errno.EISDIR if file.is_dir() else errno.ENOENT
        raise OSError(error, os.strerror(error), str(file))


def _import_module(file: Path) -> ModuleType:
    """Import a Python file.

    Like `python FILE`, puts the folder of the file first in `sys.path` and sets `sys.argv` to the file alone.
    """
    sys.path.insert(0, str(file.resolve().parent))
    sys.argv = [str(file)]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _find_function(module: ModuleType, function: str, file: Path) -> Callable[..., Any]:
    """Return a function of the imported `file`. Raises ValueError, listing all functions, if there is none."""
    value = getattr(module, function, None)
    if callable(value):
        return value
    functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
    remedy = (
        f"Use {format_alternatives(None, functions)}." if functions else "Define one that returns (jitted, arguments)."
    )
    raise ValueError(f"{file} has no function {function}. {remedy}")


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise ValueError if an output has a wrong suffix, a missing folder, or the path of an input or another output."""
    taken_paths = {split_function(options.module)[0].resolve(): "the input module"}
    if options.places is not None:
        taken_paths[options.places.resolve()] = "the file of --places"
    for key in ("json", "timeline", "html"):
        path: Path | None = getattr(options, key)
        if path is None:
            continue
        if (other := taken_paths.get(path.resolve())) is not None:
            raise ValueError(f"--{key} {path} would overwrite {other}. Choose another path.")
        require_suffix(path, ".html" if key == "html" else ".json", f"--{key} ")
        if not path.parent.is_dir():
            raise ValueError(f"--{key} {path}: there is no folder {path.parent}.")
        taken_paths[path.resolve()] = f"the file of --{key}"


def parse_mesh_axes(text: str) -> dict[str, int]:
    """Parse mesh axes such as `data=8,model=4` to their sizes, in order. Raises ValueError for other text."""
    entries = [re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9][0-9]*)\s*", entry) for entry in text.split(",")]
    axes = {entry[1]: int(entry[2]) for entry in entries if entry}
    if len(axes) != len(entries):
        raise ValueError(f"--mesh {text}: write each axis once with its size, such as --mesh data=8,model=4.")
    return axes


def _read_places(file: Path) -> list[Position]:
    from valkyrie.hardware.position import Position

    if not file.exists() and str(file).startswith("["):
        raise ValueError(f"--places {file}: write the list to a file, such as --places places.json.")
    try:
        places = json.loads(file.read_text())
    except ValueError:
        places = None
    if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
        raise ValueError(f'--places {file}: write a JSON list such as ["0:0,0,0:0", "0:1,0,0:0"].')
    return [Position.parse(place) for place in places]


if __name__ == "__main__":
    main()
