"""Tests of the Python API: documented examples run, mistakes raise ValueError, and imports are deferred."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import valkyrie
from helpers import MODELS
from runs import TINY_ARGUMENTS
from test_explain_mode import prediction
from valkyrie import api
from valkyrie.hardware.platforms.tpu import Tpu
from valkyrie.processes.child import run_streamed
from valkyrie.runs.layout_record import LayoutRecord
from valkyrie.search import compiling
from valkyrie.search.compile.prediction import CompileStatus, MemoryReport, Prediction
from valkyrie.sweep.columns import CSV_COLUMNS

ROOT = Path(__file__).parent.parent
PAGE_TEXT = (ROOT / "valkyrie" / "README.md").read_text()


def read_example(folder: str, number: int = 0) -> str:
    """Return listing `number`, from 0, of the Python listings in a folder's README that begin with `import`."""
    return re.findall(r"```python\n(import .*?)```", (ROOT / folder / "README.md").read_text(), re.DOTALL)[number]


QUICK_OVERRIDES = (
    "model.layers=1",
    "batch=8",
    "seq=32",
    "data=synthetic",
    "data.documents=60",
    "tracking=off",
    "eval_batches=1",
)


def shrink_example(example: str) -> str:
    """Return an example changed to use the smallest model, little data and few steps."""
    overrides = ", ".join(f'"{override}"' for override in QUICK_OVERRIDES)
    for argument in ('"steps=40"', '"batch=32"'):
        example = example.replace(argument, f"{argument}, {overrides}" if argument == '"steps=40"' else overrides)
    return example.replace("steps=40", "steps=4").replace("steps=60", "steps=6").replace("gpt_125m", "gpt_tiny")


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_training_examples_run_as_written(working_folder: Path, capsys: pytest.CaptureFixture[str]):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    namespace: dict[str, Any] = {}
    example = shrink_example(read_example("valkyrie"))
    training_example, _ = example.split("print(valkyrie.slice")
    exec(training_example, namespace)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    run = namespace["trained"]
    assert run.summary["steps"] == 6 and [line["step"] for line in run.metrics if "loss" in line][-1] == 6
    assert (run.folder / "run.yaml").is_file()
    assert "parameters:" in capsys.readouterr().out
    measurement = valkyrie.measure(namespace["run"], quiet=True)
    assert measurement.fits and measurement.step_s and measurement.record.simulated
    assert capsys.readouterr().out == ""


@pytest.mark.slow  # two compiles for a TPU
def test_the_prediction_examples_run_as_written(working_folder: Path, capsys: pytest.CaptureFixture[str]):
    namespace: dict[str, Any] = {
        "valkyrie": valkyrie,
        "run": valkyrie.compose(*TINY_ARGUMENTS, "mesh=1x1x1", "partition=dp"),
    }
    exec("print(valkyrie.slice" + shrink_example(read_example("valkyrie")).split("print(valkyrie.slice")[1], namespace)
    for result in namespace["results"]:
        assert result.status == "ok" and result.fits and 0 < result.mfu < 1 and result.peak_gib > 0
    assert "predicted step" in str(namespace["results"][0])


@pytest.mark.slow  # two compiles for a TPU
@pytest.mark.timeout(300)
def test_the_example_of_the_readme_runs_as_written(working_folder: Path, capsys: pytest.CaptureFixture[str]):
    exec(shrink_example(read_example(".")), {})
    output = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[:2] for line in output if " True " in line] == [["fsdp", "True"], ["dp", "True"]]
    assert (working_folder / output[-1].split(" ")[0] / "run.yaml").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_model_example_runs_as_written(working_folder: Path, capsys: pytest.CaptureFixture[str]):
    names: dict[str, Any] = {}
    exec(shrink_example(read_example("valkyrie", 1)), names)
    run, model, tokens = names["trained"], names["model"], names["tokens"]
    assert names["logits"].shape == (1, len(tokens[0]), 257) and names["logits"].dtype == np.float32
    np.testing.assert_allclose(run.model(tokens), names["logits"], atol=1e-5)
    np.testing.assert_allclose(run.model([*tokens, tokens[0]])[1:], names["logits"], atol=1e-5)
    assert run.model.parameters["embedding"].sharding.num_devices == 8
    assert model.generate("def ", tokens=5) == valkyrie.generate(valkyrie.load("first"), "def ", tokens=5)
    last_loss = [line["loss"] for line in run.metrics if "loss" in line][-1]
    assert run.summary["loss"] == last_loss and repr(model).startswith("<TrainedModel gpt_tiny, ")
    assert repr(run).startswith("<Trained gpt_tiny: 4 steps, loss ") and "<svg" in run._repr_html_()
    for wrong, message in (
        ([1, 2], "shape"),
        ([[1, 2], [3]], "lengths"),
        ([[1.0]], "whole numbers"),
        ([[257]], "vocabulary"),
        ([[-1]], "-1"),
    ):
        with pytest.raises(ValueError, match=rf"^tokens= .*{message}"):
            model(wrong)
    with pytest.raises(ValueError, match=r"^tokens=-1:"):
        model.generate("def ", tokens=-1)


@pytest.mark.slow  # three compiles for a TPU
@pytest.mark.timeout(300)
def test_the_search_example_runs_as_written(working_folder: Path, capsys: pytest.CaptureFixture[str]):
    example = shrink_example(read_example("valkyrie", 2)).replace("mode.compiles=4", "mode.compiles=1")
    names: dict[str, Any] = {}
    exec(example, names)
    answer, output = names["answer"], capsys.readouterr().out
    assert f"train it: {answer.command}" in output and "where the step time goes" in output
    assert (answer.folder / "search.json").is_file() and "compiled" in [row.status for row in answer.rows]
    assert names["best"].config.partition.name in answer.best.layout


@pytest.mark.slow
def test_the_example_of_reading_trials_runs_as_written(working_folder: Path):
    command = [sys.executable, "-m", "valkyrie.cli.train", "-m", *TINY_ARGUMENTS, "partition=dp,fsdp", "mode=compile"]
    result = subprocess.run(
        [*command, "mesh=2x2x1", "name=laptop_8"], cwd=working_folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    example = read_example("sweeps").replace("if row.tokens_per_second", "")
    example = example.replace("row.tokens_per_second", "row.layout")
    exec(example, {"valkyrie": valkyrie})
    assert "dp" in (working_folder / "runs" / "laptop_8" / "report.html").read_text()


def test_every_name_is_documented_and_on_its_page():
    for name in valkyrie.__all__:
        assert getattr(valkyrie, name).__doc__, name
        assert f"`{name}`" in PAGE_TEXT, name


def test_search_is_a_function_and_a_package():
    code = """
        import inspect, sys, valkyrie
        search = valkyrie.search
        import valkyrie.search.mode
        assert callable(search) and valkyrie.search is search is sys.modules["valkyrie.search"]
        assert {"slice", "meshes", "rules"} <= {*inspect.signature(valkyrie.search).parameters}
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_search_of_a_run_takes_no_settings_of_its_own():
    with pytest.raises(ValueError, match="Leave out meshes, budget"):
        untyped_valkyrie.search(valkyrie.compose("model=gpt_tiny"), meshes=[(8, 1)], budget="5min")


def test_nothing_is_imported_before_it_is_used():
    code = """
        import sys, valkyrie
        assert not [m for m in sys.modules if m.startswith("valkyrie.")], sys.modules
        run = valkyrie.compose("model=gpt_tiny", "mesh=2x2x2", "partition=fsdp")
        assert valkyrie.slice("v4-64").chips == 32 and callable(valkyrie.fit)
        assert "jax" not in sys.modules
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_showing_a_run_does_not_initialise_jax():
    """JAX's first use fixes the number of CPU devices. If showing a run used JAX, training would find one device."""
    code = f"""
import jax, valkyrie
for model in {MODELS}:
    valkyrie.show(valkyrie.compose(f"model={{model}}", "mesh=2x2x2"))
jax.config.update("jax_num_cpu_devices", 8)
print(jax.device_count())
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.stdout.endswith("\n8\n"), result.stdout + result.stderr


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["partition=fdsp"], "mean partition=fsdp?"),
        (["mesh=3x2x2", "partition=2d_tp"], "divisible by 3"),
        (["batch=0"], "batch=0:"),
        (["bach=8"], "mean batch?"),
        (["target=v4-63"], "v4-64"),
        (["target=[v5e-8,v5e-16]"], "target=v5e-8 or target=v5e-16"),
        (["batch=8,16"], "takes one"),
        (["model.name=gpt2"], "Write model=gpt2."),
        (["laptop_8"], "+sweep=laptop_8"),
        (["valkyrie-train model=gpt_tiny mesh=2x2x2"], "*answer.overrides"),
        (["mode=search", "target=v5e-8", "budget=0s"], "mode.compiles=0"),
        (["mode=search", "target=v5e-8", "budget=-5min"], "above 0"),
        (["mode=calibrate", "path=runs/a"], "mean paths?"),
    ],
)
def test_a_mistake_is_a_value_error_with_the_message_of_the_command(overrides: list[str], message: str):
    with pytest.raises(ValueError) as error:
        valkyrie.compose("model=gpt_tiny", "mesh=2x2x2", *overrides)
    assert message in str(error.value)


def test_a_folder_without_a_run_is_named(working_folder: Path):
    with pytest.raises(ValueError) as error:
        valkyrie.load(working_folder / "nothing")
    assert str(error.value).startswith(f"{working_folder / 'nothing'} does not exist")


def test_a_run_that_was_not_trained_is_not_read_as_the_newest(working_folder: Path):
    run = valkyrie.compose(*TINY_ARGUMENTS)
    for function in (valkyrie.evaluate, lambda run: valkyrie.generate(run, "def ")):
        with pytest.raises(ValueError, match=r"not been trained.* valkyrie\.load\(FOLDER\)"):
            function(run)


def test_a_run_is_loaded_by_name_or_as_the_latest(working_folder: Path):
    with pytest.raises(ValueError, match=r"^latest: no run in .* has a checkpoint"):
        valkyrie.load("latest")
    folder = working_folder / "runs" / "mine"
    folder.mkdir(parents=True)
    valkyrie.compose("model=gpt_tiny", "mesh=1x1x1", "seed=5").save(folder / "run.yaml")
    assert valkyrie.load("mine").config.seed == 5
    with pytest.raises(ValueError, match=r"^runs/mine/run\.yaml .* runs/mine\b(?!/)"):
        valkyrie.load("runs/mine/run.yaml")
    (working_folder / "api.py").touch()
    with pytest.raises(ValueError, match=r"^api\.py .*\bfile\.$"):
        valkyrie.load("api.py")
    checkpoint = folder / "checkpoints" / "5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "_CHECKPOINT_METADATA").write_text("{}")
    assert valkyrie.load("latest").config.seed == 5
    with pytest.raises(ValueError, match=r"^min: .* mine\?"):
        valkyrie.load("min")


untyped_valkyrie: Any = valkyrie


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: untyped_valkyrie.compose(["model=gpt_tiny"]),
            "compose takes strings, such as .*, not \\['model=gpt_tiny'\\]",
        ),
        (lambda: untyped_valkyrie.compose({"model": "gpt_tiny"}), "compose takes strings"),
        (
            lambda: untyped_valkyrie.compose("model=gpt_tiny", config_dir=3),
            "config_dir= takes .*, not 3",
        ),
        (lambda: untyped_valkyrie.compose(model="gpt_tiny"), "model='gpt_tiny' .* \"model=gpt_tiny\""),
        (lambda: untyped_valkyrie.load("here", steps=400), 'steps=400 .* "steps=400"'),
        (lambda: untyped_valkyrie.run_sweep(steps=3), 'steps=3 .* "steps=3"'),
        (lambda: untyped_valkyrie.load(None), "load takes .*, not None"),
        (lambda: untyped_valkyrie.load("here", 3), "load takes overrides as strings"),
        (lambda: untyped_valkyrie.slice(8), "slice takes a name, .*, not 8"),
        (lambda: untyped_valkyrie.slice(None), "slice takes a name"),
        (lambda: untyped_valkyrie.slice(["v5e-8"]), "slice takes a name"),
        (lambda: untyped_valkyrie.slice("v5e-8", slices="2"), "slices= takes a whole number, not '2'"),
        (lambda: untyped_valkyrie.slice("v5e-8", slices=True), "slices= takes a whole number, not True"),
        (lambda: untyped_valkyrie.slice("v5e-8").mesh(8, "a"), "mesh takes lists .*, not 8"),
        (lambda: untyped_valkyrie.slice("v5e-8").mesh((8,), "a"), "mesh takes lists .*, not 'a'"),
        (lambda: untyped_valkyrie.show("model=gpt_tiny"), "show takes a Run"),
        (lambda: untyped_valkyrie.fit("model=gpt_tiny"), "fit takes a Run"),
        (lambda: untyped_valkyrie.measure(None), "measure takes a Run, .*, not None"),
        (lambda: untyped_valkyrie.evaluate(None), "evaluate takes a Run"),
        (lambda: untyped_valkyrie.generate("def ", "def "), "generate takes a Run"),
        (lambda: untyped_valkyrie.load_model(None), "load_model takes .*, not None"),
        (lambda: untyped_valkyrie.from_hf(3), "from_hf takes .*, not 3"),
        (lambda: untyped_valkyrie.from_hf("llama", name=3), "name= takes a string, not 3"),
        (lambda: untyped_valkyrie.to_hf(None, "out"), "to_hf takes .*, not None"),
        (lambda: untyped_valkyrie.search("model=gpt_tiny"), "search takes a Run, or a function"),
        (
            lambda: untyped_valkyrie.explain(3, "runs"),
            "first= takes a Run .*, not 3",
        ),
        (
            lambda: untyped_valkyrie.run_sweep(["mesh=2x2x2"]),
            "run_sweep takes strings, such as .*, not \\['mesh=2x2x2'\\]",
        ),
        (lambda: untyped_valkyrie.trials(None), "trials takes paths .*, not None"),
        (lambda: untyped_valkyrie.write_report(None), "write_report takes paths .*, not None"),
        (lambda: predict(tokens="8192"), "tokens= takes a number, not '8192'"),
        (lambda: predict(tokens=True), "tokens= takes a number, not True"),
        (lambda: predict(time_limit_s=False), "time_limit_s= takes .*, not False"),
        (lambda: predict(options=["xla_x"]), "options= takes a dictionary"),
        (lambda: predict(places=3), "places= takes a list of positions"),
    ],
)
def test_a_wrong_type_is_a_type_error_with_one_line(call: Any, message: str):
    with pytest.raises(TypeError, match=f"^{message}") as error:
        call()
    assert "\n" not in str(error.value)


def predict(**arguments: Any) -> valkyrie.Result:
    return valkyrie.predict("step.hlo", slice=valkyrie.slice("v5e-8"), mesh={"data": 8}, **arguments)


def test_the_error_for_a_slice_that_does_not_exist_names_the_nearest():
    assert valkyrie.slice(" v5e-8 ") == valkyrie.slice("v5e-8")
    with pytest.raises(ValueError) as error:
        valkyrie.slice("v5e-7")
    assert "v5e-8" in str(error.value)


def test_a_result_that_does_not_fit_has_the_needed_memory():
    memory = MemoryReport(needed=3 * 2**30, usable=2**30)
    record = LayoutRecord("m", "1x1x1", "dp", "cpu-1", described="d", roles="r", batch=1, seq=2, precision="float32")
    result = valkyrie.Result(Prediction(record, CompileStatus.does_not_fit, "too big", memory=memory))
    assert result.fits is False and (result.peak_gib, result.peak_bytes) == (3, 3 * 2**30) and result.step_s is None
    assert "needs 3.0 GiB" in str(result) and "1.0 GiB usable" in str(result)


SEARCH_OVERRIDES = ("model=gpt_tiny", "target=v5e-8", "batch=32")


def test_a_search_of_a_training_run_fixes_what_it_sets(working_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tpu, "compiler_install_hint", lambda self, target: "no compiler")
    run = valkyrie.compose(*SEARCH_OVERRIDES, "mesh=2x4x1", "partition=fsdp", "name=mine")
    answer = valkyrie.search(run, quiet=True)
    assert {row.status for row in answer.rows} == {"estimated"}
    assert all(row.layout.startswith("mesh=2x4x1 partition=fsdp") for row in answer.rows)
    assert answer.folder.name.startswith("search-gpt_tiny-v5e-8") and answer.folder.is_dir()
    assert valkyrie.compose(*answer.overrides).config.partition.name == "fsdp"
    second = answer.run(answer.rows[1])
    assert second.config.name is None and second.config.mode.name == "train" and answer.folder.is_absolute()
    assert answer.rows[1].layout in " ".join(second.arguments) and second.layout_record().batch == 32
    option = "target.chip.xla_options.xla_saves=true"
    with_options = dataclasses.replace(answer, record=dataclasses.replace(answer.record, options=[option]))
    for row, count in zip(with_options.rows[:2], (1, 0), strict=True):
        assert with_options.run(row).arguments.count(option) == count, "of the best layout alone"
    with pytest.raises(ValueError, match=r"^answer\.run .*<FoundLayout 99: "):
        answer.run(dataclasses.replace(answer.best, rank=99))
    with pytest.raises(TypeError, match=r"^first= .*answer\.run\(row\)"):
        untyped_valkyrie.explain(answer.best, second)
    assert repr(answer).startswith("<Answer mesh=2x4x1 partition=fsdp") and "<td" in answer._repr_html_()
    for row in answer.rows:
        assert all(isinstance(value, str | int | float | None) for value in vars(row).values())


def test_an_interrupted_search_keeps_its_answer(working_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Tpu, "compiler_install_hint", lambda self, target: None)

    def press_ctrl_c(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "compile_trial", press_ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        valkyrie.search(valkyrie.compose(*SEARCH_OVERRIDES, "mode=search", "name=stopped"), quiet=True)
    assert (working_folder / "runs" / "stopped" / "search.json").is_file()


def test_a_search_in_which_nothing_fits_is_a_value_error(working_folder: Path):
    run = valkyrie.compose("model=llama_7b", "target=v5e-4", "batch=4", "seq=8192", "mode=search")
    with pytest.raises(ValueError, match=r"nothing fits: .* chips are enough"):
        valkyrie.search(run, quiet=True)


def test_layouts_that_cannot_be_explained_are_named(working_folder: Path):
    run = valkyrie.compose(*SEARCH_OVERRIDES, "mesh=2x4x1")
    with pytest.raises(ValueError, match=r"^second: .* runs/nothing\."):
        valkyrie.explain(run, "runs/nothing")
    (working_folder / "runs" / "empty").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"(?m)^second: runs/empty .*compile\.json"):
        valkyrie.explain(run, "empty")
    with pytest.raises(ValueError, match=r"^first: target=auto "):
        valkyrie.explain(valkyrie.compose("model=gpt_tiny", "mesh=2x2x2"), run)


def test_an_explanation_prints_the_report_of_the_command():
    explanation = valkyrie.explain(valkyrie.Result(prediction()), valkyrie.Result(prediction("2d_tp", exposed_y=1.2)))
    assert explanation.sentences[0].startswith("A is 4.00") and explanation.sentences[0] in repr(explanation)
    assert "where the step time goes" in str(explanation) and "<pre>" in explanation._repr_html_()


REFUSED_SWEEP_OVERRIDES = (
    "model=gpt_tiny",
    "mesh=3x3x1,3x3x2",
    "target=v5e-8",
    "mode=compile",
    "tracking=off",
    "name=refused",
)


def test_a_sweep_returns_plain_rows_and_refuses_wrong_settings(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
):
    rows = valkyrie.run_sweep(*REFUSED_SWEEP_OVERRIDES)
    assert "2 trials: 2 refused" in capsys.readouterr().out and repr(rows) == "<Trials 2: 2 refused>"
    assert rows == valkyrie.trials("runs") and "<td" in rows._repr_html_()
    assert [(row.mesh, row.status, row.model) for row in rows] == [
        ("3x3x1", "refused", "gpt_tiny"),
        ("3x3x2", "refused", "gpt_tiny"),
    ]
    for row in rows:
        assert all(isinstance(value, str | int | float | None) for value in vars(row).values())
    with pytest.raises(ValueError, match=r"^run_sweep needs settings"):
        valkyrie.run_sweep()
    with pytest.raises(ValueError, match=r"^bach .*\bbatch\b"):
        valkyrie.run_sweep("bach=3,4", quiet=True)
    assert capsys.readouterr() == ("", "")


def test_a_sweep_that_fails_after_some_trials_raises(monkeypatch: pytest.MonkeyPatch):
    def fail_after_a_trial(command: Sequence[str], on_line: Callable[[str], object]) -> tuple[int, str]:
        on_line("folder: runs/swept")
        return 2, "valkyrie-train: runs/swept/trials.jsonl: no space left on device.\n"

    monkeypatch.setattr(api, "run_streamed", fail_after_a_trial)
    with pytest.raises(ValueError, match=r"^runs/swept/trials\.jsonl: no space"):
        valkyrie.run_sweep("batch=2,4", quiet=True)


def test_rows_have_the_columns_of_csv_files():
    assert [field.name for field in dataclasses.fields(valkyrie.TrialRow)] == [c.name for c in CSV_COLUMNS]


def test_a_streamed_command_ends_on_ctrl_c_with_its_last_lines():
    script = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores SIGINT
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("saved")
"""
    lines: list[str] = []

    def press_ctrl_c(line: str) -> None:
        lines.append(line)
        if line == "ready":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_streamed([sys.executable, "-c", script], press_ctrl_c)
    assert lines == ["ready", "saved"]


def test_runs_and_slices_are_short_tables_in_notebooks():
    run = valkyrie.compose(*SEARCH_OVERRIDES, "mesh=2x4x1", "partition=fsdp")
    search = valkyrie.compose("model=gpt_tiny", "mode=search", "target=[v4-8,v5e-8]")
    assert repr(search).startswith("<Run gpt_tiny, mode=search target=v4-8,v5e-8, ")
    assert "<td" in run._repr_html_() and "x=2 FSDP" in run._repr_html_() and len(repr(run)) < 120
    assert "layout" not in valkyrie.compose(*SEARCH_OVERRIDES, "mode=search")._repr_html_()
    assert "8 v5e chips" in valkyrie.slice("v5e-8")._repr_html_() and "$" in valkyrie.slice("v5e-8")._repr_html_()
    assert "<td" in valkyrie.slice("cpu8")._repr_html_()
