"""Tests of the documentation: commands compose, links resolve, and numbers agree with the code and the data."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain, zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from helpers import PARTITIONS, compose_config, compose_run, config_names
from machines import needs_libtpu
from runs import copy_run
from sweeps import fake_outcomes
from test_compile_tpu import run_train_process
from test_folder import make_run
from valkyrie.cli.convert import _parser as convert_parser
from valkyrie.cli.data_commands import _parser as data_parser
from valkyrie.cli.doctor import _parser as doctor_parser
from valkyrie.cli.launch import _check_training
from valkyrie.cli.launch import split_at_dashes as split_launch
from valkyrie.cli.parser import strip_comment
from valkyrie.cli.predict import _parser as predict_parser
from valkyrie.cli.report import _parser as report_parser
from valkyrie.config.compose import default_partition
from valkyrie.config.modes import MODES
from valkyrie.config.run import Run
from valkyrie.hardware.names import parse_target
from valkyrie.hardware.platforms.tpu import Tpu
from valkyrie.launch.choose import parse_engine_config
from valkyrie.sweep.trial import Status, TrialLog

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("conf", "experiments", "sweeps", "tests", "valkyrie")
PATHS = [ROOT / "README.md", *sorted({p.resolve() for folder in FOLDERS for p in (ROOT / folder).rglob("README.md")})]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in PATHS}
"""Every documentation page, by its path."""
README, CONF, SEARCH = PAGES["README.md"], PAGES["conf/README.md"], PAGES["valkyrie/search/README.md"]
EXPERIMENTS, PACKAGE = PAGES["experiments/README.md"], PAGES["valkyrie/README.md"]
LISTING = re.compile(r"^```\w+\n.*?^```\n", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(
    r"^(?:.*&& )?(?:uv run )?(valkyrie-(?:train|report|data|predict|launch|doctor|convert)(?: .*)?)$", re.MULTILINE
)


def fenced_blocks(page: str) -> str:
    """Return the fenced blocks without a language: commands and their output."""
    return "\n".join(re.findall(r"^```\n(.*?)^```", LISTING.sub("", page), re.DOTALL | re.MULTILINE))


def spans(page: str) -> list[str]:
    """Return the code spans of the text, outside fenced blocks."""
    text = re.sub(r"^```.*?^```", "", LISTING.sub("", page), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


def table(page: str, start: str) -> list[list[str]]:
    """Return the cells of the first table whose header starts with `start`, row by row, without the header."""
    _, _, *rows = page.split(f"\n| {start}", 1)[1].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for row in rows]


def first_number(text: str) -> float:
    """Return the first number of a text."""
    return float(re.findall(r"\d[\d,.]*", text)[0].replace(",", ""))


def section(page: str, heading: str) -> str:
    """Return the text below a heading, up to the next heading."""
    return re.split(rf"^#+ {re.escape(heading)}$", page, flags=re.MULTILINE)[1].split("\n#")[0]


SPANS = [span for page in PAGES.values() for span in spans(page)]
FENCED_COMMANDS = [
    line for page in PAGES.values() for line in COMMAND.findall(fenced_blocks(page)) if "FOLDER" not in line
]
"""Commands in fenced blocks, except those with the placeholder FOLDER."""
INLINE_COMMANDS = [
    span for span in SPANS if re.match(r"valkyrie-\w+ ", span) and "FOLDER" not in span and "ZONE" not in span
]
"""Commands in sentences and tables, except those with the placeholders FOLDER or ZONE."""
COMMANDS = list({line.partition(" #")[0].rstrip(): line for line in INLINE_COMMANDS + FENCED_COMMANDS}.values())
"""All commands without duplicates, each with its comment if it has one."""


def arguments_of(line: str) -> list[str]:
    """Return the arguments of a command line, split as zsh does. Comments are not removed, but become arguments."""
    typed, _, comment = line.partition(" #")
    return [*shlex.split(typed)[1:], *(["#", *comment.split()] if comment else [])]


TRAIN_COMMANDS = [line for line in COMMANDS if line.startswith("valkyrie-train")]


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 250


def test_the_commands_are_found():
    assert len(TRAIN_COMMANDS) >= 35 and len([line for line in TRAIN_COMMANDS if " -m " in line]) >= 4
    assert any("resume=latest" in line for line in TRAIN_COMMANDS) and any("~/books" in line for line in TRAIN_COMMANDS)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_points_to_a_file_and_a_heading(page: str):
    for target in re.findall(r"\]\(((?!https:)[^)]+)\)", PAGES[page]):
        path, _, anchor = target.partition("#")
        linked = (ROOT / page).parent / path if path else ROOT / page
        assert linked.is_file(), target
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE) if anchor else []
        anchors = [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
        assert not anchor or anchor in anchors, target


def test_every_page_can_be_reached_from_the_readme():
    for page in PAGES:
        assert page == "README.md" or f"]({page}" in README, page


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), "mine", "model=gpt_tiny", "mesh=2x2x2")


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.slow] if " -m " in line else []) for line in TRAIN_COMMANDS]
)
def test_every_command_composes(
    command: Any, finished_run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str
):
    arguments = arguments_of(line)
    if "-m" in arguments:
        monkeypatch.setattr(Tpu, "compiler_install_hint", lambda self, target: None)
        fake_outcomes(monkeypatch, **dict.fromkeys(PARTITIONS, Status.ok))
        evaluated = ("run-a", "run-b") if "mode=eval" in arguments else ()
        for name in evaluated:
            copy_run(finished_run, tmp_path / "runs").rename(tmp_path / "runs" / name)
        ended = command("tracking=off", *arguments)
        sweeps = [folder for folder in (tmp_path / "runs").iterdir() if folder.name not in evaluated]
        trials = [trial.status for sweep in sweeps for trial in TrialLog(sweep).read()]
        assert ended.status == 0 and trials.count(Status.ok) >= (len(evaluated) or 8), ended.err
        return
    copy_run(finished_run, tmp_path / "runs")
    composed = command(*arguments)
    assert (composed.status, composed.err) == (0, "")
    assert composed.run is not None or composed.out.startswith(("valkyrie-train trains", "mode:"))


@pytest.mark.slow
def test_the_listed_sweep_runs(command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (listing,) = re.findall(r"```yaml\n(.*?)```", PAGES["sweeps/README.md"], re.DOTALL)
    folder = tmp_path / "mine"
    (folder / "sweep").mkdir(parents=True)
    (folder / "sweep" / "mine.yaml").write_text(listing)
    fake_outcomes(monkeypatch, **dict.fromkeys(PARTITIONS, Status.ok))
    result = command("tracking=off", "--config-dir", str(folder), "-m", "+sweep=mine")
    (sweep,) = (tmp_path / "runs").iterdir()
    trials = list(TrialLog(sweep).read())
    assert result.status == 0 and len(trials) >= 8, result.err


LAUNCH_COMMANDS = [line for line in COMMANDS if line.startswith("valkyrie-launch")]


@pytest.mark.parametrize("line", [line for line in LAUNCH_COMMANDS if " -- " in line])
def test_commands_after_valkyrie_launch_compose(command: Any, line: str):
    ahead, overrides = split_launch(arguments_of(line))
    config = parse_engine_config([word for word in ahead if "=" in word], restarts=0)
    composed = command(*(overrides or ()))
    assert (composed.status, composed.err) == (0, "") and composed.run is not None
    _check_training(config, overrides or ())


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("valkyrie-doctor ")])
def test_arguments_of_the_doctor_compose(command: Any, line: str):
    _, overrides = doctor_parser().parse_known_args(arguments_of(line))
    composed = command(*overrides)
    assert (composed.status, composed.err) == (0, "") and composed.run is not None


OTHERS = [line for line in COMMANDS if not line.startswith(("valkyrie-train", "valkyrie-launch", "valkyrie-doctor"))]


@pytest.mark.parametrize("line", OTHERS)
def test_other_commands_accept_their_arguments(line: str):
    parsers = {"valkyrie-report": report_parser, "valkyrie-predict": predict_parser, "valkyrie-data": data_parser}
    parsers["valkyrie-convert"] = convert_parser
    parsers[line.split(" ")[0]]().parse_args(strip_comment(arguments_of(line)))


SETTINGS = [span for span in SPANS if re.fullmatch(r"[a-z][\w./]*=[^ ,=]\S*", span) and "NAME" not in span]


KEYS = {setting.split("=")[0] for setting in SETTINGS} - {"quiet"}
SEARCHED = {"batch=auto", "batch=N", "device_batch=[2,4,8]"}
"""Documented settings that do not compose: shorthand that only `mode=search` expands, and the placeholder N."""


def documented_examples(is_turn: Callable[[str], bool]) -> list[list[str]]:
    """Return lists of documented settings: the first one of each key for which `is_turn(key)`, the second ones, etc."""
    examples: dict[str, list[str]] = {}
    for setting in dict.fromkeys(SETTINGS):
        key = setting.split("=")[0]
        if key in KEYS and is_turn(key) and not key.startswith("hydra") and "mine" not in setting:
            examples.setdefault(key, []).extend([] if setting in SEARCHED else [setting])
    return [[s for s in turn if s] for turn in zip_longest(*examples.values())]


SETTINGS_OF_MODES = documented_examples(lambda key: key.startswith("mode."))
TURNS = [
    *documented_examples(lambda key: "." not in key),
    *documented_examples(lambda key: "." in key and not key.startswith("mode.")),
    *([setting] for setting in chain(*SETTINGS_OF_MODES)),
]


@pytest.mark.parametrize("settings", TURNS, ids=lambda settings: " ".join(settings)[:40])
def test_every_documented_setting_exists(settings: Sequence[str]):
    """Composes settings of different keys together. A setting that does not exist is named in the error."""
    keys = [setting.split("=")[0] for setting in settings]
    modes = [f"mode={MODES.names_with_key(key.removeprefix('mode.'))[0]}" for key in keys if key.startswith("mode.")]
    Run.from_config(compose_config("target=v4-64", "mesh=2x2x2", *modes, *chain(*map(shlex.split, settings))))
    for setting in settings:
        assert not re.search(r"[\[*?]", re.sub(r"'.*?'", "", setting)), "zsh looks for files of such a name"


def test_every_documented_key_is_composed():
    composed = {setting.split("=")[0] for setting in chain(*TURNS)}
    assert len(composed) >= 50 and {key for key in KEYS if not key.startswith("hydra")} - composed <= {"resume"}


def test_a_command_with_a_comment_can_be_pasted_into_any_shell():
    """Interactive zsh, the default on macOS, does not support comments: their words become arguments of the command."""
    for line in (line for page in PAGES.values() for line in fenced_blocks(page).splitlines()):
        head, sign, comment = line.partition(" #")
        assert not sign or not head.startswith(("pip ", "uv ", "python ")), f"{line}: only our commands skip comments"
        if sign and head.startswith("valkyrie-"):
            assert not re.search(r"""[;&|<>()$`\\"'*?\[\]{}!~]""", comment), line


def test_counts_equal_those_of_the_code():
    (parameters,) = re.findall(r"([\d,]+) parameters", README.replace("\n", " "))
    assert int(parameters.replace(",", "")) == compose_run("mesh=2x2x2").model.parameter_count()
    (minutes,) = re.findall(r"CI_SLOW_MINUTES:-(\d+)", (ROOT / ".ci" / "run").read_text())
    assert ("half an hour" in PAGES["tests/README.md"].replace("\n", " ")) == (minutes == "30")


def test_the_listed_extras_exist():
    table = re.findall(r"^\| (`.*?) \|", section(PACKAGE, "Installation"), re.MULTILINE)
    listed = {extra for cell in table for extra in re.findall(r"`([\w-]+)`", cell)}
    optional = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {*listed, "dev"} == {*optional}
    assert {extra for page in PAGES.values() for extra in re.findall(r"extra\s+`([\w-]+)`", page)} <= {*optional}


def test_only_python_3_11_has_the_stated_jax():
    (stated,) = re.findall(r"3\.11\s+gets JAX ([\d.]*\d)", PACKAGE)
    assert version("jax").startswith(f"{stated}.") == (sys.version_info[:2] == (3, 11))


def first_column(page: str, heading: str) -> list[str]:
    """Return the names in the first column of the tables below a heading."""
    cells = re.findall(r"^\| (`.*?) \|", section(page, heading), re.MULTILINE)
    return [name for cell in cells for name in re.findall(r"`([^`]*[^`=])`", cell)]


def test_lists_of_choices_equal_the_files():
    assert sorted(name for name in first_column(CONF, "Partitions") if re.fullmatch(r"\w+", name)) == PARTITIONS
    assert sorted(first_column(CONF, "Precision")) == config_names("precision")
    assert sorted(first_column(CONF, "Data")) == config_names("data")
    assert sorted(first_column(CONF, "Modes")) == MODES.names()
    assert sorted(row[0].strip("`") for row in table(PAGES["sweeps/README.md"], "`+sweep=`")) == config_names("sweep")
    sized, *unsized = (row[1] for row in table(section(CONF, "Models"), "family"))
    sizes = re.findall(r"`(tiny|\d+[mb])`", sized)
    named = [f"{family}{size}" for family in re.findall(r"`(\w+_)\*`", sized) for size in sizes]
    assert sorted(named + [name for row in unsized for name in re.findall(r"`(\w+)`", row)]) == config_names("model")


def test_target_names_count_cores_or_chips_as_stated():
    targets = section(CONF, "Targets")
    for unit, cores in (("cores", 2), ("chips", 1)):
        (chips,) = re.findall(rf"^\| TPU (.*?) \| {unit} \|", targets, re.MULTILINE)
        for chip in chips.split(", "):
            assert parse_target(f"{chip}-32").chips == 32 // cores, chip
    for name in re.findall(r"`([a-z]\w*[-:][\dx]+|cpu\d+)`", targets):
        assert parse_target(name)


REPORT = section(SEARCH, "Predict one layout").split("```")[3]
ROWS = {
    name.split("`")[1]: tuple(first_number(cell) for cell in cells) for name, *cells in table(SEARCH, "`partition=`")
}
"""Peak memory in GiB, step time in ms, tokens/s/chip and MFU in percent, for each partition in a table of `SEARCH`."""


def compiled_run(partition: str) -> Run:
    """Return the run of the documented `mode=compile target=v4-64` command, with its partition replaced."""
    line = next(line for line in TRAIN_COMMANDS if "mode=compile target=v4-64" in line and " -m " not in line)
    return compose_run(*(a for a in arguments_of(line) if "partition" not in a), f"partition={partition}")


def test_the_readme_shows_lines_of_the_report():
    shown = section(README, "Predict a layout").split("```")[3]
    assert all(line in REPORT.replace("        (and the rest", "\n") for line in shown.splitlines())
    assert len(shown.splitlines()) > 12


def test_the_search_output_in_the_readme_is_consistent():
    shown = section(README, "Search for the fastest layout").split("```")[3]
    rows = [line.split() for line in shown.splitlines() if re.match(r" +\d +mesh=", line)]
    run = compose_run("target=v5p-64", "model=llama_8b", "batch=256", "seq=4096", "mesh=32x1x1")
    chip = run.config.target.chip
    assert len(rows) == 3 and chip is not None and chip.usd_per_hour is not None
    for cells in rows:
        step, rate, hours, dollars = (first_number(cells[i]) for i in (2, 9, 11, 12))
        assert rate == pytest.approx(256 * 4096 / 32 / step, rel=1e-3)
        assert hours == pytest.approx(20e9 / rate / 32 / 3600, rel=5e-3)
        assert dollars == pytest.approx(20e9 / rate / 3600 * chip.usd_per_hour, rel=1e-3)


def test_the_report_matches_the_run_and_is_consistent():
    run = compiled_run("2d_tp")
    assert REPORT.strip().splitlines()[0] == f"valkyrie_1b under {run.layout.name} on {run.config.target.describe()}"
    assert f"roles: {run.layout.describe_roles()}\n" in REPORT
    (line,) = re.findall("predicted step: (.*)", REPORT)
    step, rate, per_chip, mfu = (first_number(part) for part in line.split(", "))
    assert ROWS["2d_tp"] == (first_number(REPORT.split("\nfits: ")[1]), 1000 * step, per_chip, mfu)
    assert rate == pytest.approx(32 * per_chip, rel=1e-3)
    chip = run.config.target.chip
    assert chip is not None and chip.usd_per_hour is not None
    (millions,) = re.findall(r"([\d.]+) million tokens", REPORT)
    assert float(millions) == pytest.approx(rate * 3600 / (32 * chip.usd_per_hour) / 1e6, abs=0.005)
    waits = re.findall(r"([\d.]+) ms +([\d.]+)%", REPORT)
    assert len(waits) == 4
    for milliseconds, percent in waits:
        assert float(percent) == pytest.approx(float(milliseconds) / step / 10, abs=0.06)


def test_the_search_table_is_consistent_and_matches_the_model():
    rows = table(SEARCH, "layout on v4-64")
    run, steps = compose_run("target=v4-64", "model=valkyrie_1b", "batch=128", "mesh=32x1x1", "partition=fsdp"), []
    for _, _, *cells in rows:
        milliseconds, rate, mfu = map(first_number, cells)
        steps.append(milliseconds / 1000)
        assert rate == pytest.approx(128 * 2048 / 32 / steps[-1], rel=2e-3)
        assert mfu == pytest.approx(100 * run.step_flops / (32 * 275e12) / steps[-1], abs=0.06)
    assert len(steps) == 4 and steps == sorted(steps)


def test_the_partition_table_is_consistent_and_matches_the_text():
    assert len(ROWS) == 6
    for partition, (_, milliseconds, rate, mfu) in ROWS.items():
        run = compiled_run(partition)
        assert rate == pytest.approx(64 * 2048 / 32 / (milliseconds / 1000), rel=2e-3), partition
        assert mfu == pytest.approx(100 * run.step_flops / (32 * 275e12) / (milliseconds / 1000), abs=0.06), partition
    assert ROWS["fsdp"][1] == min(row[1] for row in ROWS.values()) and "fastest, needs" in " ".join(SEARCH.split())
    assert ROWS["dp"][0] / ROWS["fsdp"][0] == pytest.approx(10, rel=0.1) and "a tenth of" in SEARCH
    assert "`fsdp` (the default)" in SEARCH and default_partition() == "fsdp"


def test_the_summary_of_published_runs_matches_the_rows():
    written = (ROOT / "experiments" / "published" / "results.md").read_text()
    cells = re.compile(r"^\| (\w+) \| (\d+) \| ([\d.%, ]+) \| ([\d.%, ]+) \| ([\d.%, ]+) \|", re.MULTILINE)
    stated, computed = (
        {row[0]: row[1:] for row in cells.findall(text)}
        for text in (section(EXPERIMENTS, "Predicted against published"), written)
    )
    assert list(stated) == ["v4", "v5e", "v5p", "v6e", "all"]
    assert stated == {chip: computed[chip] for chip in stated}
    errors = re.findall(r"^\|(?:[^|]*\|){3}[^|]*\| ([+-][\d.]+)% \|", written, re.MULTILINE)
    assert len(errors) == int(computed["all"][0])
    assert f"{median(abs(float(error)) for error in errors):.1f}%" == computed["all"][1].split(",")[0]


def test_the_accuracy_in_the_readme_matches_the_full_table():
    short, full = table(README, "chip | runs"), section(EXPERIMENTS, "Predicted against published")
    rows = {chip: (runs, cells) for chip, runs, *cells in table(full, "chip | rows")}
    for chip, runs, *cells in short:
        prediction, _, constant = (cell.split(", ")[:2] for cell in rows[chip][1])
        assert (rows[chip][0], prediction + constant) == (runs, cells), chip
    pairs = dict(row[:2] for row in table(full, "order of pairs"))["all"]
    assert len(short) == 5 and pairs.replace(" of ", " of the ") in README


REPORT_COMMAND = next(line for line in TRAIN_COMMANDS if "mode=compile target=v4-64" in line and " -m " not in line)
"""The command that produced the report on the pages."""
COMPILER = re.findall(r"with libtpu ([\d.]+\d)", SEARCH)[0]
# pip installs a different libtpu for each Python version and after each release, and step times differ between them.
# The figures on the pages can only be compared with the libtpu they name.
needs_the_same_libtpu = pytest.mark.skipif(
    find_spec("libtpu") is not None and version("libtpu") != COMPILER,
    reason=f"the pages show predictions with libtpu {COMPILER}, and other versions predict other times",
)


def flatten_text(text: str) -> str:
    """Return a text without line breaks, column padding, line numbers of sources, and the units `%` and `ms`."""
    return " ".join(re.sub(r"(\.py):\d+", r"\1", text).replace("%", "").replace(" ms ", " ").split())


@pytest.fixture(scope="module")
def compile_output(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """A function that runs a compile command and returns its output without line breaks (`flatten_text`)."""
    folder = tmp_path_factory.mktemp("compiled")

    def call(line: str) -> str:
        return flatten_text(run_train_process(folder, *arguments_of(line)).stdout)

    return call


@pytest.mark.slow
@needs_libtpu
@needs_the_same_libtpu
@pytest.mark.timeout(900)
def test_the_report_equals_a_new_prediction(compile_output: Callable[[str], str]):
    printed, shown = compile_output(REPORT_COMMAND), re.sub(r" +\(and the rest;.*", "", REPORT).strip()
    lines, hint = shown.split("hint: ")
    for part in [*lines.splitlines(), f"hint: {hint}"]:
        assert flatten_text(part) in printed, part


@pytest.mark.slow
@needs_libtpu
@needs_the_same_libtpu
@pytest.mark.timeout(900)
def test_the_row_of_the_default_partition_equals_a_new_prediction(compile_output: Callable[[str], str]):
    printed, (peak, milliseconds, rate, mfu) = compile_output(REPORT_COMMAND.replace("2d_tp", "fsdp")), ROWS["fsdp"]
    assert f"fits: {peak} GiB of" in printed
    assert first_number(printed.split("predicted step: ")[1]) == pytest.approx(milliseconds, abs=0.6)
    assert f"{rate:,.0f} tokens/s/chip, MFU {mfu} of" in printed


@pytest.mark.slow
@needs_libtpu
@needs_the_same_libtpu
def test_the_page_shows_the_output_for_a_layout_that_does_not_fit(compile_output: Callable[[str], str]):
    line = next(line for line in TRAIN_COMMANDS if "target=v5e-4" in line)
    printed, shown = compile_output(line), fenced_blocks(SEARCH).split(line)[1].split("\nvalkyrie-train")[0]
    assert flatten_text(shown.replace(", ...", "")) in printed
