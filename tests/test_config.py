"""Tests of the configuration: every choice composes, and a printed or saved config reads back as the same run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from helpers import assert_golden_message, compose_config, compose_run, config_names, mark_slow_except, shared_run
from sweeps import multirun_plans
from valkyrie.config.arguments import parse_run
from valkyrie.config.compose import GROUPS, count_accelerators, default_mesh, default_partition
from valkyrie.config.refusals import describe_unknown_key
from valkyrie.config.run import FAMILIES, Run
from valkyrie.parallel.mesh import abstract_mesh
from valkyrie.parallel.partition import Role, RoleKind
from valkyrie.paths import conf_dir, read_defaults
from valkyrie.problems import ProblemCode
from valkyrie.processes.distributed import DistributedConfig
from valkyrie.runs.folder import write_run_files
from valkyrie.sweep.names import trial_key
from valkyrie.train.program import StepProgram
from valkyrie.train.run_memory import expected_memory

GOLDEN_FILE = Path(__file__).parent / "goldens" / "config_default.yaml"
CHOICES = {group: config_names(group) for group in GROUPS}
EXPERIMENTS = config_names("experiment")
SWEEPS = config_names("sweep")
WRITTEN_OUT_SWEEPS = [n for n in SWEEPS if "/hydra/sweeper:" not in (conf_dir() / "sweep" / f"{n}.yaml").read_text()]
"""Sweeps whose file lists the jobs. The others have a sweeper that enumerates them (`test_sweep_layouts.py`)."""


def test_every_group_has_choices_and_every_folder_is_a_group():
    folders = {path.name for path in conf_dir().iterdir() if path.is_dir()}
    assert folders == {*GROUPS, "experiment", "size", "sweep", "hydra"}
    assert all(CHOICES.values())
    assert EXPERIMENTS
    assert SWEEPS


@pytest.mark.parametrize("turn", range(max(len(names) for names in CHOICES.values())))
def test_every_choice_of_every_config_group_composes(turn: int):
    """Each turn takes the next choice of every group at once. Composing each choice separately would take a minute."""
    choices = {group: names[turn % len(names)] for group, names in CHOICES.items()}
    run = Run.from_config(compose_config(*(f"{group}={choice}" for group, choice in choices.items())))
    names = {group: getattr(run.config, group).name for group in GROUPS}
    assert names == choices | ({"mode": "measure"} if choices["mode"] == "quick_measure" else {})


@pytest.mark.parametrize("path", sorted(conf_dir().rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_first_comment_of_a_file_is_the_command_that_uses_it(path: Path):
    comments = [line for line in path.read_text().splitlines() if not line.startswith("# @package")]
    assert comments[0].startswith("# valkyrie-train ")
    group = path.parent.name
    if group in GROUPS:
        assert f"{group}={path.stem}" in comments[0]
    if group in ("experiment", "sweep"):
        assert f"+{group}={path.stem}" in comments[0]


def test_the_default_run_equals_the_golden_file():
    """`UPDATE_GOLDENS=1 pytest tests/test_config.py` rewrites the file."""
    composed = OmegaConf.to_yaml(compose_config("mesh=2x2x2"))
    if os.environ.get("UPDATE_GOLDENS"):
        GOLDEN_FILE.write_text(composed)
    assert composed == GOLDEN_FILE.read_text()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_a_legal_run(name: str):
    run = compose_run(f"experiment={name}")
    assert RoleKind.idle not in {role.kind for role in run.layout.roles.values()}
    assert run != compose_run("mesh=2x2x2")
    chip = run.config.target.chip
    if chip is not None and chip.usable_hbm_gib is not None:
        program = StepProgram(run, abstract_mesh(run.config.mesh), backend="cpu")
        expected = expected_memory(run, program.abstract_state)
        assert expected.total / 2**30 < chip.usable_hbm_gib / chip.devices


@pytest.mark.parametrize("spelling", ["experiment=", "+experiment="])
def test_an_experiment_can_be_selected_both_ways_and_overridden(command: Any, spelling: str):
    run = command(f"{spelling}valkyrie_1b_v4_64", "steps=7").run
    assert (run.model.name, run.layout.name, run.config.seq) == (
        "valkyrie_1b",
        "4x4x2-fsdp-remat_minimal_with_context",
        4096,
    )
    assert (run.config.steps, run.config.target.name) == (7, "v4-64")


@pytest.mark.parametrize("name", WRITTEN_OUT_SWEEPS)
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["-m", "+sweep="], ["sweep="]])
def test_every_sweep_has_legal_runs(command: Any, monkeypatch: pytest.MonkeyPatch, name: str, arguments: list[str]):
    plans = multirun_plans(command, monkeypatch, *arguments[:-1], arguments[-1] + name)
    assert len(plans) > 1
    assert len({plan.key for plan in plans}) == len({plan.name for plan in plans}) == len(plans)
    assert {str(plan.folder) for plan in plans} == {f"runs/{name}"}
    assert [plan.refusal for plan in plans] == [None] * len(plans)


def test_a_job_of_a_multirun_is_a_single_run_with_the_same_arguments(command: Any, monkeypatch: pytest.MonkeyPatch):
    """A sweep's file starts a multirun. If a job composed the file again, it would start another one, endlessly."""
    first, second = multirun_plans(
        command, monkeypatch, "-m", "+sweep=laptop_partitions", "partition=dp,sp", "steps=5", "seq=${batch}"
    )
    assert [p.about.partition for p in (first, second)] == ["dp", "sp"]
    assert first.run is not None
    config = first.run.config
    assert (config.partition.name, config.steps, config.seq) == ("dp", 5, 32)
    assert (config.runs, config.name) == ("runs/laptop_partitions", first.name)
    assert trial_key(first.run) == first.key


@pytest.mark.parametrize(
    "flags",
    mark_slow_except(
        [["--config-dir", "my own"], ["--config-path", "my own", "--config-name", "mine"]], [["--config-dir", "my own"]]
    ),
)
@pytest.mark.slow
def test_a_job_uses_the_configuration_of_the_multirun(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str]
):
    folder = tmp_path / "my own"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text("# @package _global_\nsteps: 11\n")
    (folder / "mine.yaml").write_text(command("steps=11", "mesh=2x2x2", "--cfg", "job").out)
    arguments = [*flags, "-m", 'runs="it\'s here"']
    arguments += ["experiment=mine", "mesh=2x2x2,4x2x1"] if flags[0] == "--config-dir" else ["seed=0,1"]
    plan = multirun_plans(command, monkeypatch, *arguments)[0]
    assert plan.run is not None and plan.flags == tuple(flags[:1] + [str(folder)] + flags[2:])
    config = plan.run.config
    assert (config.steps, config.mesh.name, config.seed) == (11, "2x2x2", 0)
    assert config.runs.startswith("it's here/sweep-")


def test_the_output_of_cfg_job_composes_the_same_run(command: Any, tmp_path: Path):
    arguments = ["mesh=4x4x2", "partition=fsdp", "model=s5_tiny", "precision=bf16", "optimizer.clip_norm=null"]
    output = command(*arguments, "--cfg", "job")
    assert output.status == 0
    assert output.run is None
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "mine.yaml").write_text(output.out)
    run = command(*arguments).run
    assert run is not None
    OmegaConf.clear_resolvers()  # as in a process of its own, which reads the file before there are any
    assert command("--config-path", str(tmp_path / "saved"), "--config-name", "mine").run == run
    second_result = command("--config-path", str(tmp_path / "saved"), "--config-name", "mine", "steps=9").run
    assert second_result.config.steps == 9
    assert [path.name for path in tmp_path.iterdir()] == ["saved"], "no folder and no log of Hydra's is left behind"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], marks=pytest.mark.slow),
        pytest.param(["experiment=valkyrie_1b_v4_64", "name=mine", "seed=3"], marks=pytest.mark.slow),
        ["mesh=2s2x2x1", "mesh.placement=[z,x,y,s]", "data=text", "data.paths=[a b.txt,'*.md']", "top_k=null"],
        ["mesh=1x1x1", "model.attention.windows=[null,8]", "partition.zero1=true", "debug=nans", "prompt='a: {b}'"],
    ],
)
def test_a_saved_run_reads_back_as_itself(command: Any, tmp_path: Path, overrides: list[str]):
    run = command(*overrides).run
    assert run is not None
    folder = tmp_path / "run folder"
    folder.mkdir()
    run.save(folder / "run.yaml")
    loaded = OmegaConf.load(folder / "run.yaml")
    assert isinstance(loaded, type(OmegaConf.create({})))
    run = run.changed(data=run.config.data.with_full_paths())
    assert Run.from_config(loaded) == run
    assert command("--config-path", str(folder), "--config-name", "run").run == run
    assert list(tmp_path.iterdir()) == [folder], "no folder and no log of Hydra's is left behind"


def add_checkpoint(folder: Path) -> None:
    """Add a checkpoint to a run folder, so that `resume=` and the modes that read a run find it."""
    (folder / "checkpoints" / "3").mkdir(parents=True)
    (folder / "checkpoints" / "3" / "_CHECKPOINT_METADATA").touch()


PROMPTS = ["class ", "def f(x):", "é 😀", "'it's \\ \"x\"\\", "x = {1: [2]}  # y, z", " 1e3", "a\nb "]


@pytest.mark.parametrize("prompt", mark_slow_except(PROMPTS, ["class ", "'it's \\ \"x\"\\"]))
def test_a_prompt_is_taken_literally_also_when_the_run_resumes(command: Any, tmp_path: Path, prompt: str):
    run = command(f"prompt={prompt}", "mesh=1x1x1", "partition=dp").run
    assert run.config.prompt == prompt
    folder = tmp_path / "runs" / "a"
    write_run_files(run, folder)
    add_checkpoint(folder)
    assert command("resume=a").run.config.prompt == prompt


@pytest.mark.parametrize(
    ("argument_text", "prompt"),
    [("'class '", "class "), ('"a, b"', "a, b"), (r"a\ \(b\)", "a (b)"), ("${name}!", "mine!")],
)
def test_a_prompt_in_hydras_grammar_is_parsed_by_hydra(command: Any, argument_text: str, prompt: str):
    assert command(f"prompt={argument_text}", "name=mine").run.config.prompt == prompt


@pytest.mark.parametrize(
    ("typed", "prompts"),
    [
        ("class ,b", ["class", "b"]),
        pytest.param("'a (b), c','null'", ["a (b), c", "null"], marks=pytest.mark.slow),
        pytest.param("def f(a, b): ", ["def f(a, b): "] * 2, marks=pytest.mark.slow),
        pytest.param("class ", ["class "] * 2, marks=pytest.mark.slow),
    ],
)
def test_several_prompts_make_a_sweep(command: Any, monkeypatch: pytest.MonkeyPatch, typed: str, prompts: list[str]):
    several = [] if prompts[0] != prompts[1] else ["seed=0,1"]
    plans = multirun_plans(command, monkeypatch, "-m", "mesh=1x1x1", f"prompt={typed}", *several)
    runs = [plan.run for plan in plans if plan.run is not None]
    assert [run.config.prompt for run in runs] == prompts
    assert [trial_key(run) for run in runs] == [plan.key for plan in plans]


def test_a_composed_file_accepts_keys_and_choices(command: Any, tmp_path: Path):
    folder = tmp_path / "runs" / "a"
    write_run_files(command("mesh=1x1x1", "partition=dp", "model=s5_tiny").run, folder)
    arguments = ["--config-path", "runs/a", "--config-name", "run"]
    assert command(*arguments, "mode=show").run.config.mode.name == "show"
    config = command(*arguments, "partition=fsdp", "mode=show", "model.layers=3").run.config
    assert (config.partition.name, config.mode.name, config.model.name, config.model.layers) == (
        "fsdp",
        "show",
        "s5_tiny",
        3,
    )
    add_checkpoint(folder)
    assert command(*arguments, "mode=eval").run.config.resume == str(folder)
    assert command("resume=a", "mode=eval").run.model.name == "s5_tiny"
    result = command("resume=a", "partition=nix")
    assert "as_saved" not in result.err and "Choices: 1d_tp" in result.err


def test_a_run_yaml_that_ends_too_early_is_not_completed_from_defaults(command: Any, tmp_path: Path):
    folder = tmp_path / "runs" / "a"
    write_run_files(command("mesh=1x1x1", "partition=dp", "model=s5_tiny", "steps=9").run, folder)
    text = (folder / "run.yaml").read_text()
    for name in ("run", "copied"):
        for shortened_text in (text[: text.index("steps:")], text[:-2], text[:-30] + "\0", text.splitlines()[0]):
            (folder / f"{name}.yaml").write_text(shortened_text)
            result = command("--config-path", "runs/a", "--config-name", name)
            assert (result.status, result.run) == (2, None)
            assert result.err.startswith(f"valkyrie-train: {folder}/{name}.yaml is damaged (")
            assert ("name=a" in result.err) is (name == "run"), "a copy is no run that a name could continue"
            assert len(result.err.splitlines()) == 1
    (folder / "run.yaml").write_text("\n".join(line for line in text[: text.index("hydra:")].splitlines()[1:]))
    assert command("--config-path", "runs/a", "--config-name", "run").run.config.steps == 9, "as of --cfg job"


OWN_FILES = {
    "partition/mine": "defaults: [partition_schema, 1d_tp, _self_]\nname: mine\nzero1: true\n",
    "mesh/mine": "defaults: [mesh_schema, _self_]\nname: mine\nshape: [2, 4, 1]\nplacement: [z, x, y]\n",
    "target/mine": "defaults: [target_schema, chip/v4@chip, _self_]\nname: mine\nplatform: tpu\nchips: 8\nhosts: 2\n",
    "model/mine": "defaults: [s5_tiny, _self_]\nname: mine\nlayers: 6\n",
    "experiment/mine": "# @package _global_\ndefaults: [override /partition: mine, override /mesh: mine]\nsteps: 11\n",
}


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    for name, text in OWN_FILES.items():
        path = tmp_path / "own" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "own"


def test_a_users_own_files_are_choices_like_any_other(command: Any, own_folder: Path):
    run = command("--config-dir", str(own_folder), "partition=mine", "mesh=mine", "target=mine", "model=mine").run
    assert run.layout.name == "mine-mine-order_zxy-zero1"
    target = run.config.target
    assert (target.name, target.chip.name, target.chips, target.hosts) == ("mine", "v4", 8, 2)
    assert run.model.layers == 6
    for spelling in ("experiment=mine", "+experiment=mine"):
        run = command("--config-dir", str(own_folder), spelling).run
        assert (run.config.steps, run.config.partition.name, run.config.mesh.name) == (11, "mine", "mine")


def test_the_refusal_of_an_unknown_choice_lists_the_users_files(command: Any, own_folder: Path):
    result = command("--config-dir", str(own_folder), "partition=mien")
    assert "partition=mine" in result.err
    assert all(name in result.err for name in [*CHOICES["partition"], "mine"])


def test_help_has_every_choice_with_a_file_and_no_schema(command: Any):
    output = command("--help").out
    assert "_schema" not in output
    for name in chain(*CHOICES.values(), EXPERIMENTS, SWEEPS):
        assert name in output
    assert "\ntarget: auto, cpu\n" in output
    assert all(target in output for target in ("v4-64", "v5litepod-16", "tpu7x-128", "h100-16"))


def test_the_launch_environment_gives_mesh_and_partition(command: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_MESH_CONFIG", "2,1,2")
    assert command().run.layout.name == "2x1x2-fsdp"
    monkeypatch.setenv("TPU_AXIS_NAMES", "model,data,fsdp")
    run = command().run
    assert run.layout.name == "2x1x2-data_model_fsdp"
    assert run.layout.roles == {
        "x": Role(RoleKind.MP1, ("mlp", "heads", "kv_heads", "vocab", "state")),
        "y": Role(RoleKind.unused),
        "z": Role(RoleKind.FSDP, ("batch", "embed")),
    }
    assert command("mesh=environment", "partition=2d_tp").run.layout.name == "2x1x2-2d_tp"
    explicit = command("mesh=4x1x1", "partition=dp").run
    assert explicit.config.mesh.names is None
    unused = Role(RoleKind.unused)
    assert explicit.layout.roles == {"x": Role(RoleKind.DP, ("batch",)), "y": unused, "z": unused}


@pytest.mark.parametrize(
    ("typed", "paths"),
    [
        ("[~/books/**/*.txt]", ["~/books/**/*.txt"]),
        pytest.param("~/books", ["~/books"], marks=pytest.mark.slow),
        pytest.param("[/a/b.txt,'/c d/e.txt']", ["/a/b.txt", "/c d/e.txt"], marks=pytest.mark.slow),
        ("/a,/b", ["/a", "/b"]),
        pytest.param("gs://bucket/books/**/*.txt", ["gs://bucket/books/**/*.txt"], marks=pytest.mark.slow),
        ("[gs://bucket/[ab]*.txt,/c]", ["gs://bucket/[ab]*.txt", "/c"]),
    ],
)
def test_paths_are_taken_literally(command: Any, typed: str, paths: list[str]):
    assert command(f"data.paths={typed}", "data=text", "mode=show").run.config.data.paths == paths


OWN_MESH_EXPERIMENT = "# @package _global_\ndefaults: [override /mesh: 4x1x1]\n"


@pytest.mark.parametrize("sizes", mark_slow_except(["4,4,2", "4x4x2", "4,4"], ["4x4x2"]))
@pytest.mark.parametrize("override", ["mesh=4x1x1", "experiment=mine"])
def test_the_launch_environment_is_ignored_if_a_mesh_is_set(
    command: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sizes: str, override: str
):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "mine.yaml").write_text(OWN_MESH_EXPERIMENT)
    monkeypatch.setenv("TPU_MESH_CONFIG", sizes)
    monkeypatch.setenv("TPU_AXIS_NAMES", "data,model,fsdp")
    run = command("--config-dir", "own", override, "model=s5_tiny").run
    assert (run.layout.name, run.config.mesh.names) == ("4x1x1-fsdp", None)


def test_an_impossible_launch_environment_is_refused(command: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPU_MESH_CONFIG", "4x4x2")
    result = command()
    assert result.status == 2
    assert result.err.startswith("valkyrie-train: TPU_MESH_CONFIG=4x4x2: ") and "4,4,2" in result.err
    assert result.err.count("\n") == 1
    monkeypatch.setenv("TPU_MESH_CONFIG", "3,1,1")
    assert "TPU_MESH_CONFIG=3,1,1 sets the mesh" in command("target=cpu8", "partition=fsdp").err
    assert "TPU_MESH_CONFIG" not in command("target=cpu8", "partition=fsdp", "mesh=3x1x1").err
    monkeypatch.setenv("TPU_MESH_CONFIG", "2,2,2")
    monkeypatch.setenv("TPU_AXIS_NAMES", "data,model,expert")
    assert ("unknown_role", "expert") in [(p.code.value, p.value) for p in parse_run([]).problems()]


def test_a_machine_without_accelerators_gets_eight_simulated_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert count_accelerators() == 0
    assert (default_mesh(), default_partition()) == ("2x2x2", "fsdp")


def test_accelerators_are_on_the_last_mesh_axis_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("valkyrie.config.compose.count_accelerators", lambda: 4)
    assert default_mesh() == "1x1x4"


@pytest.mark.parametrize(
    ("file", "text", "override"),
    [
        ("experiment/m.yaml", "steps: 5\n", "experiment=m"),
        ("sweep/m.yaml", "defaults: [override /mode: show]\n", "sweep=m"),
        ("partition/m.yml", "name: m\n", "partition=m"),
        ("experiment/m.yaml", "steps: 5\n", "experiment=own/experiment/m.yaml"),
        ("experiment/m.yaml", "# @package _global_\ndefaults: [override /partiton: dp]\n", "experiment=m"),
        ("experiment/m.yaml", "# @package _global_\nmodel: gpt_tiny\n", "experiment=m"),
        ("partitions/m.yaml", "name: m\n", "partition=m"),
        ("partition/m.yaml", "- embed\n", "partition=m"),
        ("sweep/m.yaml", "# @package _global_\nhydra: {sweeper: {space: {meshes: [1x1x1]}}}\n", "sweep=m"),
    ],
)
def test_a_mistake_in_a_users_file_is_refused_with_its_remedy(
    command: Any, tmp_path: Path, file: str, text: str, override: str
):
    path = tmp_path / "own" / file
    path.parent.mkdir(parents=True)
    path.write_text(text)
    result = command("--config-dir", "own", override)
    assert result.status == 2 and result.err.startswith("valkyrie-train: ") and result.err.count("\n") == 1
    message = result.err.replace(f"{tmp_path}/", "")
    assert_golden_message("config", [file, text.replace("\n", " "), override], message)


def test_all_wrong_values_of_a_users_file_are_refused_at_once(command: Any, tmp_path: Path):
    rules = b"parameters: {mlp: x, heads: [x]}\nactivations: {seq: y}\n"
    path = write_own_file(
        tmp_path, "partition/m.yaml", b"defaults: [partition_schema]\nname: m\nzero1: maybe\n" + rules
    )
    start, *problems = command("--config-dir", "own", "partition=m").err.splitlines()
    assert start == "valkyrie-train: 3 problems" and "partition.zero1=maybe: " in problems[0]
    assert problems[1].startswith(f"  - {path}: partition.parameters.mlp ") and "mlp: [x]" in problems[1]
    assert problems[2].startswith(f"  - {path}: partition.activations.seq ") and "seq: [y]" in problems[2]
    assert len(problems) == 3


def test_a_choice_that_is_a_folder_or_a_broken_link_is_refused(command: Any, tmp_path: Path):
    for name in ("folder", "folder_2.yaml"):
        (tmp_path / "own" / "model" / name).mkdir(parents=True)
    (tmp_path / "own" / "model" / "link.yaml").symlink_to("gone.yaml")
    for name, fact in (
        ("folder", "folder is a folder"),
        ("folder_2", "is a folder"),
        ("link", "a link to gone.yaml, "),
    ):
        result = command("--config-dir", "own", f"model={name}")
        assert result.err.startswith(f"valkyrie-train: model={name}: {tmp_path}/own/model/") and fact in result.err


@pytest.mark.parametrize(
    ("override", "ids"),
    [("model.tokenizer=gpt2", 50257), ("data.tokenizer=cl100k_base", 100277), ("model.vocab_size=300", 300)],
)
def test_a_model_has_the_vocabulary_of_its_tokenizer(command: Any, override: str, ids: int):
    assert command("model=gpt_tiny", override).run.model.vocab_size == ids


@pytest.mark.parametrize("key", ["data.tokenizer", "model.tokenizer"])
def test_an_unknown_tokenizer_is_refused_when_the_model_is_composed(command: Any, key: str):
    result = command("model=gpt_tiny", f"{key}=gtp2")
    assert result.status == 2 and result.err.startswith(f"valkyrie-train: {key}=gtp2 ")
    assert "bytes" in result.err and f"{key}=gpt2?" in result.err


@pytest.mark.parametrize("asked", ["runs=gs://bucket/x", "data.cache_dir=s3://bucket/x"])
def test_a_bucket_url_is_refused_before_a_local_folder_is_made(asked: str):
    (problem,) = Run.from_config(compose_config(asked)).problems()
    assert (problem.code, f"{problem.key}={problem.value}") == (ProblemCode.unsupported, asked)


@pytest.mark.parametrize(
    "key", ["runs", "data.tokenizer", "data.cache_dir", "checkpoint.folder", "checkpoint.fast.folder"]
)
def test_an_empty_value_is_refused(key: str):
    (problem,) = shared_run(f"{key}=").problems()
    assert (problem.code, problem.key, problem.value) == (ProblemCode.missing, key, "")
    assert shared_run("prompt=").problems() == []


def test_an_empty_cache_variable_means_the_default_folder(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VALKYRIE_CACHE", "")
    assert compose_run().config.data.with_full_paths().cache_dir == f"{Path.home()}/.cache/valkyrie/data"


def test_a_saved_run_does_not_record_its_coordinator_and_process(tmp_path: Path):
    """Otherwise a run that is resumed on one host would wait for the other hosts."""
    process_settings = ["distributed.coordinator=a:1", "distributed.processes=2", "distributed.process=1"]
    compose_run(*process_settings, "distributed.heartbeat_s=9").save(tmp_path / "run.yaml")
    saved_settings = Run.from_config(OmegaConf.load(tmp_path / "run.yaml")).config.distributed
    assert saved_settings == DistributedConfig(heartbeat_s=9.0)


ALIAS_BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
)
YAML_HEADER = "# @package _global_\n"
CALLBACK = "callbacks: {e: {_target_: shutil.copytree, src: own, dst: stolen}}\n"


def write_own_file(tmp_path: Path, file: str, body: bytes) -> Path:
    """Write a file of the folder `own`, which tests give to `--config-dir`, and return its path."""
    path = tmp_path / "own" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(body)
    return path


@pytest.mark.parametrize(
    ("file", "body", "argument", "phrase"),
    [
        ("partition/fsdp.yaml", b"not: [yaml", "partition=dp", "set name: my_fsdp"),
        ("experiment/m.yaml", f"{YAML_HEADER}defaults: [m]\n".encode(), "experiment=m", "includes the file"),
        ("experiment/m.yaml", f"{YAML_HEADER}{ALIAS_BOMB}\n".encode(), "experiment=m", "100,000 values"),
        ("experiment/m.yaml", b"\xef\xbb\xbf# @package _global_\nsteps: 5\n", "experiment=m", "byte order mark"),
        ("experiment/m.yaml", b"# @package _global_\nname: caf\xe9\n", "experiment=m", "line 2,"),
    ],
)
def test_the_error_for_an_unreadable_config_file_names_it(
    command: Any, tmp_path: Path, file: str, body: bytes, argument: str, phrase: str
):
    path = write_own_file(tmp_path, file, body)
    result = command("--config-dir", str(tmp_path / "own"), argument, "mode=show")
    assert result.status == 2 and result.err.startswith(f"valkyrie-train: {path}") and phrase in result.err


@pytest.mark.parametrize(
    ("file", "text", "argument", "phrase"),
    [
        ("partition/m", "defaults: [fsdp, _self_]\nzero1: true\n", "partition=m", "has no name"),
        pytest.param(
            "partition/m",
            "defaults: [partition_schema, _self_]\nname: fsdp\n",
            "partition=m",
            "has name: fsdp",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "partition/m",
            "defaults: [partition_schema, _self_]\nname: other\n",
            "partition=m",
            "has name: other.",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "model/m", "defaults: [s5_tiny, _self_]\nlayers: 2\n", "model=m", "has no name", marks=pytest.mark.slow
        ),
        ("target/chip/m", "defaults: [v5e, _self_]\nhbm_gib: 1\n", "target=m-8", "has no name"),
        pytest.param(
            "mesh/m",
            "defaults: [mesh_schema, _self_]\nshape: [2, 1, 1]\n",
            "mesh=m",
            "has no name",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_users_file_needs_its_own_name(
    command: Any, tmp_path: Path, file: str, text: str, argument: str, phrase: str
):
    path = write_own_file(tmp_path, f"{file}.yaml", text.encode())
    result = command("--config-dir", "own", argument, "mode=show")
    assert result.status == 2 and result.err.startswith(f"valkyrie-train: {path}") and phrase in result.err
    assert result.err.endswith("Write name: m.\n")
    assert command("--config-dir", "own", "mode=show").run is not None, "the file is not chosen"
    path.write_text(f"{re.sub('name: .*', '', text)}name: m\n")
    assert "Write name" not in command("--config-dir", "own", argument, "mode=show").err


@pytest.mark.parametrize(
    ("file", "entries", "after", "remedy"),
    [
        ("optimizer/m", "adamw_schema", "adamw_schema", "[adamw_schema, _self_]"),
        ("partition/m", "dp", "dp", "[dp, _self_]"),
        ("target/m", "target_schema, chip/v4@chip", "target_schema", "[target_schema, chip/v4@chip, _self_]"),
    ],
)
def test_a_users_file_is_refused_if_its_schema_would_replace_its_values(
    command: Any, tmp_path: Path, file: str, entries: str, after: str, remedy: str
):
    path = write_own_file(tmp_path, f"{file}.yaml", f"defaults: [_self_, {entries}]\nname: m\n".encode())
    result = command("--config-dir", "own", f"{path.parent.name}=m", "mode=show")
    assert result.status == 2 and result.err.startswith(f"valkyrie-train: {path}: defaults ")
    assert f"_self_ before {after}" in result.err and f"defaults: {remedy}" in result.err


@pytest.mark.parametrize(
    ("file", "key", "family", "fact"),
    [
        ("optimizer/m", "family", "muon", "has family: adamw"),
        ("data/m", "source", "text", "has source: stdlib"),
    ],
)
def test_a_users_file_with_the_schema_of_another_family_is_refused(
    command: Any, tmp_path: Path, file: str, key: str, family: str, fact: str
):
    value = fact.removeprefix("has ") if ":" in fact else ""
    path = write_own_file(tmp_path, f"{file}.yaml", f"defaults: [{family}_schema, _self_]\nname: m\n{value}\n".encode())
    result = command("--config-dir", "own", f"{path.parent.name}=m", "mode=show")
    assert result.status == 2 and result.err.startswith(f"valkyrie-train: {path} {fact}, ")
    assert f" {key}: {family}." in result.err


@pytest.mark.parametrize(
    ("name", "text", "remedy"),
    [
        ("orders", "", "[orders_schema, _self_]"),
        ("orders_small", "", "[orders_schema, _self_]"),
        ("m", "source: text\n", "[text_schema, _self_]"),
        ("m", "defaults: [_self_]\n", "NAME is one of orders, parquet_stream, "),
        ("m", "defaults: [order_schema, _self_]\n", "Did you mean orders_schema?"),
    ],
)
def test_a_users_file_needs_the_schema_of_a_module(command: Any, tmp_path: Path, name: str, text: str, remedy: str):
    path = write_own_file(tmp_path, f"data/{name}.yaml", f"{text}name: {name}\n".encode())
    (tmp_path / "own" / "orders.py").touch()
    result = command("--config-dir", "own", f"data={name}", "data.paths=[a]", "mode=show")
    assert result.status == 2 and result.err.startswith(f"valkyrie-train: {path} ") and remedy in result.err


def test_a_config_dir_above_the_folder_of_a_users_files_is_corrected(command: Any, tmp_path: Path):
    path = write_own_file(tmp_path, "data/orders.yaml", b"name: orders\n")
    result = command("--config-dir", ".", "data=orders")
    assert (
        result.status == 2
        and f"{path} is not read" in result.err
        and f"--config-dir {path.parent.parent}" in result.err
    )


def test_mode_files_and_copies_of_shipped_files_may_keep_the_shipped_name(command: Any, tmp_path: Path):
    for group in ("mode", "partition", "checkpoint"):
        (tmp_path / "own" / group).mkdir(parents=True)
    (tmp_path / "own/mode/m.yaml").write_text("defaults: [measure_schema, _self_]\nname: measure\nrepeats: 7\n")
    (tmp_path / "own/checkpoint/m.yaml").write_text("defaults: [async, _self_]\nevery: 7\n")
    (tmp_path / "own/partition/m.yaml").write_bytes((conf_dir() / "partition/fsdp.yaml").read_bytes())
    assert command("--config-dir", "own", "mode=m", "partition=m", "checkpoint=m").run.config.mode.repeats == 7


@pytest.mark.slow
def test_a_file_that_others_only_include_needs_no_name_until_it_is_chosen(command: Any, tmp_path: Path):
    folder = tmp_path / "own/partition"
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text("defaults: [fsdp, _self_]\nzero1: true\n")
    (folder / "m.yaml").write_text("defaults: [base, _self_]\nname: m\n")
    assert command("--config-dir", "own", "partition=m").run.config.partition.name == "m"
    result = command("--config-dir", "own", "-m", "partition=m,base", "mode=show")
    assert all(part in result.out + result.err for part in ("partition/base.yaml has no name", "name: base"))


@pytest.mark.parametrize(
    ("base", "phrase"),
    [(ALIAS_BOMB, "partition/base.yaml: its aliases"), ("defaults: [m, _self_]\n", "includes the file itself")],
    ids=["aliases", "cycle"],
)
def test_an_included_file_is_checked_before_it_is_read(command: Any, tmp_path: Path, base: str, phrase: str):
    folder = tmp_path / "own/partition"
    folder.mkdir(parents=True)
    (folder / "base.yaml").write_text(f"{base}\n")
    (folder / "m.yaml").write_text("defaults: [base, _self_]\n")
    assert "m.yaml has no name" in command("--config-dir", "own", "partition=m").err
    (folder / "m.yaml").write_text("defaults: [base, _self_]\nname: m\n")
    result = command("--config-dir", "own", "partition=m")
    assert result.status == 2 and phrase in result.err


@pytest.mark.slow
def test_a_sweep_refuses_trials_with_a_file_that_has_a_shipped_name(command: Any, tmp_path: Path):
    (tmp_path / "own/partition").mkdir(parents=True)
    (tmp_path / "own/partition/m.yaml").write_text("defaults: [fsdp, _self_]\nzero1: true\n")
    result = command("--config-dir", "own", "-m", "partition=m,fsdp", "mode=show")
    assert "partition/m.yaml has no name" in result.out + result.err


@pytest.mark.parametrize(
    ("body", "phrase"),
    [
        ("defaults: [s5_tiny, _self_]\nname: m\ns5:\n\tstate_size: 8\n", "line 4: a tab"),
        pytest.param("name: &x m\ns5: *x\n\tstate_size: 8\n", "line 3: a tab", marks=pytest.mark.slow),
        pytest.param("name: m\nlayers: [2\n", "line 3: not valid YAML: ", marks=pytest.mark.slow),
    ],
)
def test_invalid_yaml_is_refused_with_its_line_only_if_it_is_chosen(
    command: Any, tmp_path: Path, body: str, phrase: str
):
    path = tmp_path / "own/model/m.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(body)
    result = command("--config-dir", "own", "model=m", "mode=show")
    assert result.status == 2 and result.err.startswith(f"valkyrie-train: {path}, {phrase}")
    assert read_defaults(path) == []
    assert command("--config-dir", "own", "model=gpt_tiny", "mode=search", "target=v5e-8").run is not None
    unknown = command("--config-dir", "own", "model=no")
    assert "model=no is not a choice" in unknown.err


def test_a_choice_with_spaces_in_its_name_is_refused_with_a_new_name(command: Any, tmp_path: Path):
    path = tmp_path / "own/model/mein modell ü.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("defaults: [s5_tiny, _self_]\n")
    result = command("--config-dir", "own", "model=mein modell ü")
    assert result.status == 2 and "without spaces" in result.err
    assert all(part in result.err for part in (f" {path} ", " mein_modell.yaml ", "model=mein_modell"))


@pytest.mark.parametrize(
    ("folder", "remedy"),
    [
        ("own/experiment", "--config-dir {}/own."),
        ("own", " to {}/own/experiment."),
        ("experiment/experiment", "--config-dir {}/experiment."),
    ],
)
def test_a_file_directly_in_the_config_folder_is_refused_with_the_right_folder(
    command: Any, tmp_path: Path, folder: str, remedy: str
):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "lr.yaml").write_text("# @package _global_\nsteps: 5\n")
    result = command("--config-dir", folder, "+experiment=lr")
    assert result.status == 2 and result.err.startswith(f"valkyrie-train: experiment=lr: {tmp_path / folder}/lr.yaml ")
    assert result.err.endswith(f"{remedy.format(tmp_path)}\n")


@pytest.mark.parametrize("second_flags", [["--config-dir", "b"], ["-cd=b"]])
def test_a_second_config_folder_is_refused(command: Any, tmp_path: Path, second_flags: list[str]):
    for name in "ab":
        (tmp_path / name).mkdir()
    result = command("--config-dir", "a", *second_flags, "mode=show")
    assert result.status == 2 and result.err.startswith("valkyrie-train: --config-dir ") and "only once" in result.err


@pytest.mark.parametrize(
    ("file", "text", "argument", "phrase"),
    [
        ("experiment/m", "# @package _global_\nbatch:\n", "experiment=m", "batch has no value (null)"),
        ("model/m", "defaults: [s5_tiny, _self_]\nname: m\nlayers:\n", "model=m", "model.layers has no value (null)"),
    ],
)
def test_a_key_without_a_value_is_refused_with_its_file(
    command: Any, tmp_path: Path, file: str, text: str, argument: str, phrase: str
):
    path = write_own_file(tmp_path, f"{file}.yaml", text.encode())
    result = command("--config-dir", "own", argument)
    assert result.status == 2 and result.err.startswith(f"valkyrie-train: {path}: {phrase}")


@pytest.mark.parametrize(
    ("mode", "project", "phrase"),
    [
        ("ofline", "valkyrie", "WANDB_MODE=ofline: must be online, offline"),
        ("offline", "team/project", "tracking.project=team/project: "),
    ],
)
def test_settings_that_wandb_rejects_are_refused(
    command: Any, monkeypatch: pytest.MonkeyPatch, mode: str, project: str, phrase: str
):
    monkeypatch.setenv("WANDB_MODE", mode)
    result = command("model=gpt_tiny", f"tracking.project={project}")
    assert result.status == 2 and phrase in result.err
    assert command("model=gpt_tiny", f"tracking.project={project}", "tracking=off").run is not None


def test_the_wandb_mode_of_the_environment_is_checked_only_for_trainings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_MODE", "ofline")
    run = Run.from_config(compose_config("model=gpt_tiny"))
    (problem,) = run.problems()
    assert problem.key is None, "no key of the config is at fault"
    assert Run.from_config(compose_config("model=gpt_tiny", "mode=show")).problems() == []
    monkeypatch.setenv("WANDB_MODE", "shared")
    assert run.problems() == []


def test_a_copy_of_a_shipped_file_is_accepted(command: Any, tmp_path: Path):
    (tmp_path / "partition").mkdir()
    (tmp_path / "partition" / "fsdp.yaml").write_bytes((conf_dir() / "partition" / "fsdp.yaml").read_bytes())
    assert command("--config-dir", str(tmp_path)).run is not None


@pytest.mark.parametrize(
    ("code", "phrase"),
    [
        ('\nraise ValueError("boom")', "line 2: ValueError: boom"),
        ("x = (\n\ndef f(:\n", "line 3: SyntaxError"),
        ("import does_not_exist_xyz", "line 1: ModuleNotFoundError"),
        ("import sys\nsys.exit(0)", "line 2: SystemExit"),
    ],
)
def test_the_error_for_a_failed_import_names_the_module(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, phrase: str
):
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = f"broken_{phrase.split()[-1]}"
    (tmp_path / f"{module}.py").write_text(code)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text(f"defaults: [{module}_schema, _self_]\nname: mine\n")
    result = command("--config-dir", str(tmp_path), "model=mine")
    assert result.status == 2 and f"{module}.py, {phrase}" in result.err


def test_a_run_folder_from_elsewhere_runs_no_code(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "theirs"
    (tmp_path / "own").mkdir()
    folder.mkdir(parents=True)
    compose_run().save(folder / "run.yaml")
    add_checkpoint(folder)
    record = (folder / "run.yaml").read_text()
    assert "\nhydra:\n" in record
    (folder / "run.yaml").write_text(record.replace("\nhydra:\n", f"\nhydra:\n  {CALLBACK}"))
    assert command("--config-path", str(folder), "--config-name", "run").run is not None
    assert command("resume=theirs", "runs=runs").run is not None
    own_folder = tmp_path / "evil"
    own_folder.mkdir()
    (folder / "run.yaml").write_text(record.replace("modules: []", f"modules: [{own_folder}]"))
    result = command("resume=theirs", "runs=runs")
    assert result.status == 2 and f"modules=[{own_folder}]" in result.err and str(own_folder) not in sys.path
    (folder / "run.yaml").write_text(f"defaults: [run_schema, _self_]\nhydra:\n  {CALLBACK}")
    result = command("--config-path", str(folder), "--config-name", "run")
    assert result.status == 2 and f"{folder / 'run.yaml'} has a defaults list" in result.err
    assert not (tmp_path / "stolen").exists()


def test_a_resolver_of_the_calling_process_is_not_replaced(monkeypatch: pytest.MonkeyPatch):
    OmegaConf.register_new_resolver("divide", lambda a, b: "mine", replace=True)
    try:
        assert parse_run(["seed=77"]).config.optimizer.learning_rate > 0
        assert OmegaConf.create({"x": "${divide:1,2}"}).x == "mine"
    finally:
        OmegaConf.clear_resolver("divide")


@pytest.mark.parametrize("group", mark_slow_except(["mode", "data", "optimizer"], ["mode", "optimizer"]))
def test_the_refusal_of_a_key_of_another_choice_lists_the_choices_that_have_it(group: str):
    families = FAMILIES[group]
    keys = {name: {field.name for field in fields(families.config_class(name))} for name in families.names()}
    for name, group_keys in keys.items():
        text = {"mode": f"mode={name}", "data": f"data.source={name}", "optimizer": f"optimizer.family={name}"}[group]
        for key in set().union(*keys.values()) - group_keys:
            names_with_key = [other for other in families.names() if key in keys[other]]
            parent = OmegaConf.structured(families.config_class(name))
            parent[families.key.partition(".")[2]] = name
            message = str(describe_unknown_key(f"{group}.{key}", parent))
            assert text in message and all(f"{group}={other}" in message for other in names_with_key)
        parent = OmegaConf.structured(families.config_class(name))
        for member in vars(families.config_class(name)).keys() - group_keys:
            assert "without a type" not in str(describe_unknown_key(f"{group}.{member}", parent))


@pytest.mark.parametrize("key", ["tokens", "mode.tokens"])
def test_the_refusal_of_a_key_suggests_a_longer_one_that_the_mode_reads(key: str):
    keys = {"batch_tokens": None, "sample_tokens": 1, "code_eval": {"tokens": 1}, "mode": {"name": "generate"}}
    root = OmegaConf.create(keys)
    assert "mean sample_tokens? " in str(describe_unknown_key(key, root.mode if "." in key else root))


def test_a_search_cannot_be_a_trial(command: Any):
    result = command("-m", "mode=search", "target=v4-8,v5e-8")
    assert result.status == 2 and "target=[v4-8,v5e-8]" in result.err


@pytest.mark.parametrize(
    ("override", "suggestion"),
    [
        ("++optimizer.learning_rat=1", "optimizer.learning_rate"),
        ("+model.attention.head=2", "model.attention.heads"),
        ("++partition.zero=1", "partition.zero1"),
    ],
)
def test_a_key_added_with_a_plus_is_checked_too(override: str, suggestion: str):
    with pytest.raises(ValueError, match=f"Did you mean {suggestion}\\?"):
        parse_run(["model=gpt_tiny", "data=synthetic", "target=cpu8", override])


def test_a_group_in_the_defaults_of_an_experiment_is_answered_with_its_override(command: Any, tmp_path: Path):
    write_own_file(tmp_path, "experiment/mine.yaml", b"# @package _global_\ndefaults: [{model: gpt_tiny}]\n")
    result = command("--config-dir", "own", "+experiment=mine", "mode=show")
    assert result.status == 2 and "'override /model: gpt_tiny'" in result.err


def test_the_tests_compose_as_users_do() -> None:
    """The tests patch Hydra (`composing.py`) to compose faster."""
    commands = [
        ["model=gpt_tiny", "mesh=2x2x2", "partition=fsdp_tp", "optimizer.weight_decay=0.2"],
        ["+experiment=published/llama_8b_v6e", "target=v6e-16", "mesh=4x4x1", "batch=48", "remat.offload=[query]"],
        ["model=nanochat_tiny", "mode=search", "target=v5e-8", "remat=full"],
    ]
    program = f"from valkyrie.config.arguments import parse_run\nfor c in {commands}: print(parse_run(c).config)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [str(parse_run(command).config) for command in commands]
