"""Mistakes of users: one message in the words of the command line, exit status 2, and no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers import names
from valkyrie.config.arguments import parse_run

TOP = (
    "Known: batch, batch_tokens, checkpoint, code_eval, code_eval_every, data, debug, device_batch, distributed, "
    "eval_batches, eval_every, force, log_every, mesh, microbatches, mode, model, modules, name, optimizer, partition, "
    "precision, profile, prompt, remat, resume, runs, sample_every, sample_tokens, seed, seq, steps, target, task, "
    "temperature, top_k, tracking, trial."
)
SMALL = ["model=valkyrie_tiny", "mesh=2x2x2", "partition=2d_tp"]

ONE_LINE = {
    "a mesh of one number": (
        ["mesh=8"],
        "mesh=8 has 1 axis; a mesh has three (x, y, z) or four (w, x, y, z). Write mesh=8x1x1.",
    ),
    "a mesh of two axes": (
        ["mesh=4x4"],
        "mesh=4x4 has 2 axes; a mesh has three (x, y, z) or four (w, x, y, z). Write mesh=4x4x1.",
    ),
    "a mesh of words": (
        ["mesh=banana"],
        "mesh=banana is not a choice. A mesh is written as its sizes, such as mesh=4x4x2 or mesh=2s4x4x2. "
        "Choices: single.",
    ),
    "a mesh of the environment that is not there": (
        ["mesh=environment"],
        "mesh=environment needs TPU_MESH_CONFIG, such as TPU_MESH_CONFIG=4,4,2.",
    ),
    "a choice that is nearly one": (
        ["partition=2dtp"],
        "partition=2dtp is not a choice. Did you mean partition=2d_tp? Choices: 1d_tp, 2d_tp, 2d_tp_fsdp, "
        "data_model_fsdp, dp, fsdp, fsdp_tp, pp, pp_2d_tp, pp_fsdp, sp.",
    ),
    "a choice that is none": (
        ["precision=banana"],
        "precision=banana is not a choice. Choices: bf16, bf16_mixed, float32, fp8, int8.",
    ),
    "a mode that is none": (
        ["mode=shw"],
        "mode=shw is not a choice. Did you mean mode=show? Choices: calibrate, checkpoints, code_eval, compile, eval, "
        "explain, figures, generate, measure, quick_measure, search, show, train, tune.",
    ),
    "an experiment that is none": (
        ["experiment=nix"],
        f"experiment=nix is not a choice. Choices: {', '.join(names('experiment'))}.",
    ),
    "a sweep that is none": (["+sweep=nix"], f"sweep=nix is not a choice. Choices: {', '.join(names('sweep'))}."),
    "a key with two letters exchanged": (["modle=gpt_tiny"], f"modle is not a key. Did you mean model? {TOP}"),
    "a key with dashes": (["--steps=5"], "--steps=5: settings are written without dashes: steps=5."),
    "a key with dashes and a blank": (["--steps", "5"], "--steps: settings are written without dashes: steps=5."),
    "a key with a blank": (["steps", "5"], "steps has no value. Write steps=5, with = and without blanks."),
    "a mesh with commas": (["mesh=2,2,2"], "mesh=2,2,2: the sizes of a mesh are joined by x: mesh=2x2x2."),
    "several values without -m": (
        ["model=gpt_tiny,s5_tiny"],
        "model=gpt_tiny,s5_tiny names several values, and a run has one. For a sweep over them add -m: "
        "valkyrie-train -m model=gpt_tiny,s5_tiny",
    ),
    "a chip that is none": (
        ["mode=search", "target.chip=v9", "target.chips=64"],
        "target.chip=v9 is not known. Known chips: a100, h100, h200, tpu7x, v3, v4, v5e, v5p, v6e. Write "
        "target.chip=NAME target.chips=N, or the slice as its cloud names it, such as target=v4-64.",
    ),
    "fewer chips than none": (
        ["target.chip=v4", "target.chips=-8"],
        "target.chips=-8: a whole number of at least 1 is needed.",
    ),
    "a key that is nearly one": (["stps=3"], f"stps is not a key. Did you mean steps? {TOP}"),
    "a key that is none": (["foo=3"], f"foo is not a key. {TOP}"),
    "a key that is none, appended": (["+foo.bar=3"], f"foo is not a key. {TOP}"),
    "a key of a group": (
        ["optimizer.lr=3"],
        "optimizer.lr is not a key of optimizer.family=adamw. Did you mean optimizer.learning_rate? Known in "
        "optimizer: beta1, beta2, clip_norm, decay_steps, ema_decay, epsilon, family, final_ratio, learning_rate, "
        "name, puzzle_learning_rate, schedule, ssm_learning_rate_ratio, warmdown, warmup_steps, weight_decay.",
    ),
    "a key of a model": (
        ["model.attention.head=3"],
        "model.attention.head is not a key. Did you mean model.attention.heads? Known in model.attention: bias, "
        "causal, dilations, global_tokens, head_dim, heads, impl, kv_heads, qk_norm, rope_stretch, rope_theta, "
        "soft_cap, windows.",
    ),
    "a word for a number": (["steps=abc"], "steps=abc: a whole number is needed."),
    "a number for a list": (
        ["partition.parameters.embed=3"],
        "partition.parameters.embed: a list is needed, as partition.parameters.embed=[...].",
    ),
    "a word that is no choice of an enum": (
        ["debug=some"],
        "debug=some: use one of none, nans.",
    ),
    "a dtype that is none": (
        ["precision.compute=float16"],
        "precision.compute=float16: use one of float32, bfloat16.",
    ),
    "an argument that cannot be read": (
        ["steps=[3"],
        "steps=[3: [ and ] do not match.",
    ),
    "a text that cannot be read": (
        ["name=def f(x):"],
        "name=def f(x): has signs that are read only in quotes. Write name=\"'...'\".",
    ),
    "a letter that stands only in quotes": (
        ["modules=[sp ace é.txt]"],
        "modules=[sp ace é.txt] has signs that are read only in quotes. Write modules=\"['...']\".",
    ),
    "a letter in the place of x": (["mesh=2×2×2"], "mesh=2×2×2: sizes are joined by the letter x: mesh=2x2x2."),
    "a comma at the end": (["model=gpt_tiny,"], "model=gpt_tiny, ends with a comma. Write model=gpt_tiny."),
    "a blank after the sign": (["steps=", "5"], "steps= 5: write steps=5, without a blank after =."),
    "an empty choice": (["seed=choice()"], "seed=choice() has nothing to choose from. Write seed=1,2,3."),
    "another search path": (
        ["hydra.searchpath=[file://own]"],
        "hydra.searchpath=[file://own] replaces the folders that ship. For your own files: --config-dir FOLDER.",
    ),
    "keys that refer to each other": (
        ["steps=${batch}", "batch=${steps}"],
        "steps=${batch} and batch=${steps} refer to each other. Write a value for one of them.",
    ),
    "a reference to no key": (["steps=${nope.key}"], "steps=${nope.key}: there is no key nope.key."),
    "an argument that is no pair": (["steps"], "steps has no value. Write steps=VALUE, with = and without blanks."),
    "a family that is none": (
        ["model.family=x"],
        "model.family=x is not known. Known: gpt, gpt2, nanochat, trm, valkyrie, or the name of a module of yours "
        "next to the YAMLs of --config-dir.",
    ),
    "a variable that is not set": (
        ["runs=${oc.env:NOT_SET}"],
        "KeyError raised while resolving interpolation: \"Environment variable 'NOT_SET' not found\".",
    ),
    "a run that is not there": (
        ["resume=nothing"],
        "resume=nothing is no run with a checkpoint under runs=runs. Newest there: none.",
    ),
    "a newest run where there is none": (
        ["resume=latest"],
        "resume=latest found no run with a checkpoint under runs=runs. Train one first.",
    ),
}

SLIPS = {
    "train": "train: write mode=train.",
    "model==gpt_tiny": "model==gpt_tiny: a setting is written KEY=VALUE, without blanks: model=gpt_tiny.",
    "model = gpt_tiny": "model = gpt_tiny: a setting is written KEY=VALUE, without blanks: model=gpt_tiny.",
    "model:gpt_tiny": "model:gpt_tiny: a setting is written KEY=VALUE, without blanks: model=gpt_tiny.",
    "--steps=5": "--steps=5: settings are written without dashes: steps=5.",
    "--model gpt_tiny": "--model: settings are written without dashes: model=gpt_tiny.",
    "steps 5": "steps has no value. Write steps=5, with = and without blanks.",
    "lr=1e-3": f"lr is not a key. Did you mean optimizer.learning_rate? {TOP}",
    "heads=3": f"heads is not a key. Did you mean model.attention.heads? {TOP}",
    "batch_size=4": f"batch_size is not a key. Did you mean batch? {TOP}",
    "STEPS=4": f"STEPS is not a key. Did you mean steps? {TOP}",
    "batch=4.5": "batch=4.5: a whole number is needed.",
    "steps=1e3": "steps=1000.0: a whole number is needed. Write steps=1000.",
    "steps=": "steps= has no value: a variable that is not set?",
    "seq=null": "seq=null: a value is needed.",
    "optimizer.learning_rate=1,0": "optimizer.learning_rate=1,0 names several values, and a run has one. For a sweep "
    "over them add -m: valkyrie-train -m optimizer.learning_rate=1,0",
    "mesh=2,2,2": "mesh=2,2,2: the sizes of a mesh are joined by x: mesh=2x2x2.",
    "mesh=[2,2,2]": "mesh=[2,2,2]: mesh= takes one choice, not a list: mesh=2x2x2.",
    "partition=[fsdp]": "partition=[fsdp]: partition= takes one choice, not a list: partition=fsdp.",
    "partition=[fsdp,dp]": "partition=[fsdp,dp]: partition= takes one choice, not a list. Use partition=fsdp or "
    "partition=dp; for a sweep over them: valkyrie-train -m partition=fsdp,dp",
    "mode=tune target=[v5e-4,v5e-8]": "target=[v5e-4,v5e-8]: target= takes one choice, not a list. Use target=v5e-4 or "
    "target=v5e-8; for a sweep over them: valkyrie-train -m target=v5e-4,v5e-8",
    "partition=null": "partition=null: every run has a partition. Leave it out for the default, or choose one.",
    "mesh.name=4x4x2": "mesh.name=4x4x2 changes a name and none of the settings. Write mesh=4x4x2.",
    "partition.name=dp": "partition.name=dp changes a name and none of the settings. Write partition=dp.",
    "model.block_pattern=s5": "model.block_pattern: a list is needed, as model.block_pattern=[...].",
    "model.attention=3": "model.attention=3: model.attention is a group of settings. Set one of them, "
    "model.attention.KEY=VALUE.",
    "model.tie_embeddings=maybe": "model.tie_embeddings=maybe: true or false is needed.",
}
ONE_LINE |= {typed: (typed.split(" ") if "= " not in typed else [typed], told) for typed, told in SLIPS.items()}


@pytest.mark.parametrize("case", ONE_LINE)
def test_a_mistake_is_one_message(command: Any, case: str):
    arguments, message = ONE_LINE[case]
    refused = command(*arguments)
    assert refused.run is None
    lines = [line for line in refused.err.splitlines() if not line.startswith("  - Legal with ")]
    head = lines[0] if len(lines) == 1 else lines[1].replace("  - ", "valkyrie-train: ", 1)
    assert head == f"valkyrie-train: {message}"
    assert len(lines) <= 2
    assert (refused.status, refused.out) == (2, "")


def test_every_problem_of_a_layout_is_told_at_once(command: Any):
    refused = command("model=valkyrie_tiny", "mesh=3x2x1", "partition=2d_tp", "batch=32")
    assert refused.status == 2
    start, *problems = refused.err.splitlines()
    assert start == f"valkyrie-train: {len(problems)} problems"
    found = parse_run(["model=valkyrie_tiny", "mesh=3x2x1", "partition=2d_tp", "batch=32"]).problems()
    assert [problem.removeprefix("  - ") for problem in problems[: len(found)]] == list(map(str, found))
    sizes = [(problem.axes, problem.size) for problem in found if problem.axes]
    assert sizes == [(("state",), 32), (("mlp",), 128), (("mlp",), 256), (("heads",), 4)]


def test_partitions_that_would_be_legal_are_named(command: Any):
    refused = command("mesh=4x4x2", "partition=2d_tp", "model=valkyrie_tiny", "model.mlp=130")
    assert (
        refused.err.splitlines()[-1].strip(" -")
        == "Legal with mesh=4x4x2 as it stands: partition=dp, fsdp, pp, pp_fsdp, sp."
    )


def test_several_numbers_that_cannot_be(command: Any):
    wrong = ["steps=0", "seq=0", "optimizer.clip_norm=-1", "model.layers=0"]
    keys = [problem.key for problem in parse_run(wrong).problems()]
    assert keys == ["model.layers", "optimizer.clip_norm", "steps", "seq"]
    assert len(command(*wrong).err.splitlines()) == 1 + len(keys)


def test_a_model_that_sees_the_future_is_only_shown(command: Any):
    refused = command("model.attention.causal=false")
    assert refused.status == 2
    assert "the task next_token needs a causal model. Only mode=show accepts this model." in refused.err
    assert command("model.attention.causal=false", "mode=show").status == 0


def test_a_broken_yaml_is_a_mistake_of_the_user(command: Any, tmp_path: Any):
    folder = tmp_path / "own" / "partition"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text("name: [1,\n")
    (folder / "unknown.yaml").write_text("defaults: [partition_schema, _self_]\nnaem: mine\n")
    broken = command("--config-dir", str(folder.parent), "partition=broken")
    assert broken.status == 2
    assert "broken.yaml" in broken.err
    unknown = command("--config-dir", str(folder.parent), "partition=unknown")
    assert unknown.status == 2
    assert "partition.naem is not a key. Did you mean partition.name?" in unknown.err


def test_the_traceback_is_there_for_those_who_ask(command: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="^batch=7 "):
        command(*SMALL, "batch=7")


def test_the_refusal_on_the_page_of_the_configuration_is_what_is_printed(command: Any):
    page = (Path(__file__).parent.parent / "conf" / "README.md").read_text()
    block = page.split("$ valkyrie-train partition=2d_tp ")[1]
    arguments, *shown = block.split("```")[0].splitlines()
    refused = command("partition=2d_tp", *arguments.split())
    assert refused.status == 2
    printed = refused.err.splitlines()
    assert printed[0] == shown[0]
    for line in shown[1:]:
        assert any(one.startswith(line.removesuffix("...")) for one in printed), line
