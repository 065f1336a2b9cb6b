"""`valkyrie-convert`: converts a Hugging Face folder to a run folder, and a trained run to a Hugging Face folder."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path

from valkyrie.processes.interrupt import exit_on_ctrl_c, signals_as_exceptions


def main(argv: Sequence[str] | None = None) -> None:
    """Run `valkyrie-convert` with `argv`, or with the arguments of the process if it is None."""
    os.environ["JAX_PLATFORMS"] = "cpu"  # weights are converted on the host
    with exit_on_ctrl_c("valkyrie-convert"):
        from valkyrie.cli.parser import run_command

        run_command("valkyrie-convert", _convert, argv)


def _convert(words: list[str]) -> None:
    parser = _parser()
    arguments, overrides = parser.parse_known_args(words)
    if unknown := [word for word in overrides if "=" not in word or word.startswith("--")]:
        parser.error(f"{unknown[0]} is neither a flag nor KEY=VALUE.")
    with signals_as_exceptions():  # SIGTERM, too, deletes the unfinished folder
        arguments.run(arguments, overrides)


def _parser() -> argparse.ArgumentParser:
    from valkyrie.cli.parser import OneLineParser

    about = "Convert weights from and to Hugging Face folders: config.json, safetensors, tokenizer.json."
    parser = OneLineParser(prog="valkyrie-convert", description=about, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="{from-hf,to-hf}", parser_class=OneLineParser)

    from_hf_parser = commands.add_parser(
        "from-hf",
        help="convert a Hugging Face folder to a run folder: from-hf FOLDER KEY=VALUE ...",
        usage="valkyrie-convert from-hf [-h] [--name NAME] [--tokenizer TOKENIZER] FOLDER [KEY=VALUE ...]",
        epilog="KEY=VALUE: settings of the run, as for valkyrie-train, such as mesh=2x2x1 seq=4096.",
    )
    from_hf_parser.set_defaults(run=_convert_from_hf)
    from_hf_parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        help="Hugging Face folder with config.json and model.safetensors (or several files and their index)",
    )
    from_hf_parser.add_argument("--name", help="name of the run; default: the name of the folder")
    tokenizer_help = "bytes, gpt2, a tiktoken encoding, or a tokenizer.json; default: the folder's tokenizer.json"
    from_hf_parser.add_argument("--tokenizer", help=tokenizer_help)

    to_hf_parser = commands.add_parser("to-hf", help="convert a trained run to a Hugging Face folder")
    to_hf_parser.set_defaults(run=_convert_to_hf)
    to_hf_parser.add_argument("trained", metavar="RUN", help="name or folder of the run, or latest")
    to_hf_parser.add_argument("folder", type=Path, help="new folder to write")
    to_hf_parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs")
    to_hf_parser.add_argument("--step", type=int, help="step of the checkpoint; default: the newest")
    dtypes = ("float32", "bfloat16", "float16")
    dtype_help = "dtype of the weights; default: that of the folder that from-hf converted, or else float32. "
    dtype_help += "Selection biases of routers stay in float32"
    to_hf_parser.add_argument("--dtype", choices=dtypes, help=dtype_help)
    to_hf_parser.add_argument(
        "--file-gb",
        type=float,
        default=5.0,
        help="maximum size of each file of weights in GB (one is held in memory at a time); default: 5",
    )
    return parser


def _convert_from_hf(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    from valkyrie.config.mistakes import refuse_typos
    from valkyrie.convert.load import import_folder
    from valkyrie.runs.folder import resume_command

    start_time = time.perf_counter()
    refuse_typos(overrides, multirun=False)
    folder = import_folder(arguments.folder.expanduser(), arguments.name, arguments.tokenizer, overrides)
    print(f"wrote {folder} in {time.perf_counter() - start_time:.1f} s")
    command = resume_command(folder)
    print(f'next: {command} mode=generate prompt="class "')
    print(f"      {command} data=text 'data.paths=[~/books/**/*.txt]' steps=1000   # continues its training")


def _convert_to_hf(arguments: argparse.Namespace, overrides: Sequence[str]) -> None:
    from valkyrie.convert.save import export_run
    from valkyrie.runs.folder import find_run

    start_time = time.perf_counter()
    if overrides:
        raise ValueError(f"{overrides[0]}: to-hf does not take settings. Leave it out.")
    if not arguments.file_gb > 0:
        raise ValueError(f"--file-gb {arguments.file_gb:g}: must be above 0, such as 5.")
    folder = export_run(
        find_run(arguments.runs, arguments.trained, key=""),
        arguments.folder.expanduser(),
        step=arguments.step,
        dtype=arguments.dtype,
        file_bytes=int(1e9 * arguments.file_gb),
    )
    print(f"wrote {folder} in {time.perf_counter() - start_time:.1f} s")
    print(f"next: AutoModelForCausalLM.from_pretrained({str(folder)!r})")


if __name__ == "__main__":
    main()
