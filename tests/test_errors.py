"""Tests of users' mistakes: each gives one message in terms of the command line, exit status 2, and no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import assert_golden_message, config_names
from valkyrie.config.arguments import parse_run

SMALL_OVERRIDES = ["model=valkyrie_tiny", "mesh=2x2x2", "partition=2d_tp"]

MISTAKES: dict[str, list[str]] = {
    "a mesh of one number": ["mesh=8"],
    "a mesh of two axes": ["mesh=4x4"],
    "a mesh of words": ["mesh=banana"],
    "a mesh of the environment that is not there": ["mesh=environment"],
    "a choice that is nearly one": ["partition=2dtp"],
    "a choice that is none": ["precision=banana"],
    "a mode that is none": ["mode=shw"],
    "an experiment that is none": ["experiment=nix"],
    "a sweep that is none": ["+sweep=nix"],
    "a key with two letters exchanged": ["modle=gpt_tiny"],
    "a launcher by its class": ["-m", "steps=1,2", "hydra.launcher._target_=os.system"],
    "a removed key with a value": ["~steps", "steps=1"],
    "layouts without quotes": [
        "mode=explain",
        "first=partition=fsdp",
        "mesh=8x1x1",
        "second=partition=dp",
        "mesh=4x2x1",
    ],
    "a key with dashes": ["--steps=5"],
    "an unknown flag": ["mode=show", "--multrun"],
    "a key of another sweeper": ["-m", "model=gpt_tiny,s5_tiny", "hydra.sweeper.limit=3"],
    "a short key of a mode with dashes": ["mode=search", "--budget", "5min"],
    "a short key of a mode with blanks": ["mode=search", "budget", "=", "5min"],
    "a key with dashes and a blank": ["--steps", "5"],
    "a key with a blank": ["steps", "5"],
    "a mesh with commas": ["mesh=2,2,2"],
    "several values without -m": ["model=gpt_tiny,s5_tiny"],
    "a text with commas": ["data.field=the text, whole"],
    "several slices of a search without brackets": ["mode=search", "target=v5e-8,v4-16"],
    "a chip that is none": ["mode=search", "target.chip=v9", "target.chips=64"],
    "fewer chips than none": ["target.chip=v4", "target.chips=-8"],
    "a key that is nearly one": ["stps=3"],
    "a key that is none": ["foo=3"],
    "a key that is none, appended": ["+foo.bar=3"],
    "a key of a group": ["optimizer.lr=3"],
    "a key of a model": ["model.attention.head=3"],
    "a word for a number": ["steps=abc"],
    "a number for a list": ["partition.parameters.embed=3"],
    "a word that is no choice of an enum": ["debug=some"],
    "a dtype that is none": ["precision.compute=float16"],
    "an argument that cannot be read": ["steps=[3"],
    "a text that cannot be read": ["name=def f(x):"],
    "a letter that stands only in quotes": ["modules=[sp ace é.txt]"],
    "a letter in the place of x": ["mesh=2×2×2"],
    "a comma at the end": ["model=gpt_tiny,"],
    "a blank after the sign": ["steps=", "5"],
    "a number for a name": ["partition=3"],
    "a range outside of a sweep": ["seed=range(1,3)"],
    "an empty choice": ["seed=choice()"],
    "another search path": ["hydra.searchpath=[file://own]"],
    "keys that refer to each other": ["steps=${batch}", "batch=${steps}"],
    "a reference to no key": ["steps=${nope.key}"],
    "an argument that is no pair": ["steps"],
    "a family that is none": ["model.family=x"],
    "a family without its settings": ["optimizer.family=muon"],
    "a variable that is not set": ["runs=${oc.env:NOT_SET}"],
    "a choice from a variable that is not set": ["mesh=${oc.env:NOT_SET}"],
    "a resolver that is none": ["steps=${nope:batch}"],
    "a resolved value of a wrong type": ["steps=${oc.decode:abc}"],
    "a list for a text": ["name=[a,b]"],
    "a mapping for a text": ["runs={a:1}"],
    "a list for a choice of an enum": ["debug=[nans]"],
    "a mapping for a list": ["modules={a:1}"],
    "a list in a list": ["remat.save=[[mlp]]"],
    "a list in a list of a partition": ["partition.parameters.embed=[[x]]"],
    "a run that is not there": ["resume=nothing"],
    "a key of the run in a group": ["mode=show", "mode.batch=8"],
    "a foreign key of the run in a group": ["model.batch_size=8"],
    "several settings in one argument": ["model=gpt_tiny mesh=1x1x1"],
    "an empty argument": [""],
    "a newest run where there is none": ["resume=latest"],
}
MISTAKES |= {
    typed: typed.split(" ") if "= " not in typed else [typed]
    for typed in (
        "train",
        "model==gpt_tiny",
        "model = gpt_tiny",
        "model:gpt_tiny",
        "--steps=5",
        "--model gpt_tiny",
        "steps 5",
        "lr=1e-3",
        "heads=3",
        "batch_size=4",
        "STEPS=4",
        "batch=4.5",
        "batch=2 batch_tokens=256",
        "steps=1e3",
        "steps=",
        "seq=null",
        "optimizer.learning_rate=1,0",
        "mesh=2,2,2",
        "mesh=[2,2,2]",
        "mesh=[2x2x2,8x1x1]",
        "-m mesh=[2x2x2,8x1x1]",
        "mesh=data:2,model:4",
        "target=v4-8,v4-9",
        "partition=dp,nope",
        "precision=bfloat16",
        "precision=fp32",
        "partition=[fsdp]",
        "partition=[fsdp,dp]",
        "mode=tune target=[v5e-4,v5e-8]",
        "mode=search target=[v5e-4,v5e-8",
        "mode=compile tokens=1e9",
        "partition=null",
        "mesh.name=4x4x2",
        "partition.name=dp",
        "model=moe_tiny model.moe.capacity_factor=0.001",
        "model.block_pattern=s5",
        "model.attention=3",
        "model.tie_embeddings=maybe",
        "data=FILE",
        "data=folder/below",
        "runs=FILE",
        "runs=FILE resume=latest",
        "runs=FILE/below",
        "checkpoint.folder=FILE",
        "modules=[nothere]",
        "modules=[FILE]",
    )
}
"""Arguments by case. `goldens/messages/errors.txt` has their messages."""


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_reported_in_one_message(command: Any, case: str):
    arguments = MISTAKES[case]
    Path("FILE").touch()
    Path("folder/below").mkdir(parents=True)
    result = command(*arguments)
    assert result.run is None
    lines = [line for line in result.err.splitlines() if not line.startswith("  - Partitions that work with ")]
    head = lines[0] if len(lines) == 1 else lines[1].replace("  - ", "valkyrie-train: ", 1)
    assert head.startswith("valkyrie-train: ") and len(lines) <= 2
    assert (result.status, result.out) == (2, "")
    message = head.removeprefix("valkyrie-train: ")
    for group in ("experiment", "sweep"):  # an example that is added changes no golden
        message = message.replace(", ".join(config_names(group)), f"{{{group}}}")
    assert_golden_message("errors", arguments, message)


def test_all_problems_of_a_layout_are_reported_at_once(command: Any):
    result = command("model=valkyrie_tiny", "mesh=3x2x1", "partition=2d_tp", "batch=32")
    assert result.status == 2
    start, *problems = result.err.splitlines()
    assert start == f"valkyrie-train: {len(problems)} problems"
    expected_problems = parse_run(["model=valkyrie_tiny", "mesh=3x2x1", "partition=2d_tp", "batch=32"]).problems()
    assert [problem.removeprefix("  - ") for problem in problems[: len(expected_problems)]] == list(
        map(str, expected_problems)
    )
    sizes = [(problem.axes, problem.size) for problem in expected_problems if problem.axes]
    assert sizes == [(("state",), 32), (("mlp",), 128), (("mlp",), 256), (("heads",), 4)]


def test_all_wrong_values_and_keys_are_reported_at_once(command: Any):
    result = command("steps=a", "batch=4.5", "seq=64", "optimizer.lr=3", "stps=3", "debug=some")
    start, *problems = result.err.splitlines()
    assert start == "valkyrie-train: 5 problems"
    named = [problem.removeprefix("  - ").partition(":")[0].partition(" ")[0] for problem in problems]
    assert sorted(named) == sorted(["steps=a", "batch=4.5", "debug=some", "optimizer.lr", "stps"])


def test_legal_partitions_are_suggested(command: Any):
    result = command("mesh=4x4x2", "partition=2d_tp", "model=valkyrie_tiny", "model.mlp=130")
    subject, _, partitions = result.err.splitlines()[-1].rstrip(".").partition("partition=")
    assert "mesh=4x4x2" in subject and partitions.split(", ") == ["dp", "fsdp", "pp", "pp_fsdp", "sp"]


def test_several_invalid_numbers_are_reported_together(command: Any):
    overrides = ["steps=-3", "seq=0", "optimizer.clip_norm=-1", "model.layers=0"]
    keys = [problem.key for problem in parse_run(overrides).problems()]
    assert keys == ["model.layers", "optimizer.clip_norm", "steps", "seq"]
    assert len(command(*overrides).err.splitlines()) == 1 + len(keys)


def test_a_bidirectional_model_can_be_shown_but_not_trained(command: Any):
    result = command("model.attention.causal=false")
    assert result.status == 2
    assert "next_token" in result.err and "mode=show" in result.err
    assert command("model.attention.causal=false", "mode=show").status == 0


def test_a_broken_yaml_is_reported_as_a_mistake(command: Any, tmp_path: Any):
    folder = tmp_path / "own" / "partition"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text("name: [1,\n")
    (folder / "unknown.yaml").write_text("defaults: [partition_schema, _self_]\nnaem: mine\nname: unknown\n")
    result = command("--config-dir", str(folder.parent), "partition=broken")
    assert result.status == 2
    assert "broken.yaml" in result.err
    unknown = command("--config-dir", str(folder.parent), "partition=unknown")
    assert unknown.status == 2
    assert "partition.naem " in unknown.err and "partition.name?" in unknown.err


def test_a_traceback_is_shown_on_request(command: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="^batch=7 "):
        command(*SMALL_OVERRIDES, "batch=7")


def test_the_refusal_on_the_configuration_page_equals_the_output(command: Any):
    page = (Path(__file__).parent.parent / "conf" / "README.md").read_text()
    block = page.split("$ valkyrie-train partition=2d_tp ")[1]
    arguments, *shown_lines = block.split("```")[0].splitlines()
    result = command("partition=2d_tp", *arguments.split())
    assert result.status == 2
    printed_lines = result.err.splitlines()
    assert printed_lines[0] == shown_lines[0]
    for line in shown_lines[1:]:
        assert any(printed_line.startswith(line.removesuffix("...")) for printed_line in printed_lines), line
