"""The block of valkyrie/models/README.md in a folder of one's own trains, streams, shows, compiles and sweeps."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import PARTITIONS, assembly_of, compose_run, make_batch, make_program, run_steps
from machines import needs_libtpu
from own_feed_forward import SMALL as OWN_FEED_FORWARD
from own_feed_forward import write_folder
from valkyrie.config.run import Run
from valkyrie.extensions import add_import_path
from valkyrie.sweep.trial import Status, TrialLog

ROOT = Path(__file__).parent.parent
SMALL = ("model=gated_conv_tiny", "model.embed=32", "model.mlp=64", "model.gated_conv.channels=48", "batch=8", "seq=48")
SMALL += ("model.attention.head_dim=8", "model.loss_chunk=16", "tracking=off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user with the files that the pages list."""
    folder = tmp_path_factory.mktemp("own")
    listing = r"```(?:python|yaml)\n# FOLDER/(\S+)\n(.*?)```"
    pages = [(ROOT / path / "README.md").read_text() for path in ("valkyrie/models", "conf")]
    for name, body in re.findall(listing, "\n".join(pages), re.DOTALL):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(body)
    assert sorted(str(f.relative_to(folder)) for f in folder.rglob("*.*")) == [
        "count.py",
        "gated_conv.py",
        "mode/count.yaml",
        "model/gated_conv_tiny.yaml",
        "partition/mine.yaml",
    ]
    return folder


def train(folder: Path, *arguments: str) -> str:
    """What `valkyrie-train` prints in a process of its own."""
    command = [sys.executable, "-m", "valkyrie.cli.train", "--config-dir", str(folder), *SMALL, *arguments]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """A run of the block's model, composed in this process."""
    add_import_path([folder])
    return compose_run(*SMALL, f"hydra.searchpath=[valkyrie://groups,{folder}]", "mesh=1x1x1", "partition=dp")


@pytest.mark.slow
@pytest.mark.parametrize("partition", [*PARTITIONS, "mine"])
def test_it_takes_the_same_steps_under_every_partition(folder, run, partition):
    mine = compose_run(*SMALL, f"hydra.searchpath=[valkyrie://groups,{folder}]", "mesh=2x2x2", f"partition={partition}")
    alone, together = run_steps(make_program(run), 2).metrics, run_steps(make_program(mine), 2).metrics
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other["loss"], one["loss"], rtol=2e-5)
        np.testing.assert_allclose(np.sqrt(other["leaf_norms"]), np.sqrt(one["leaf_norms"]), rtol=2e-4)


@pytest.mark.slow
def test_it_streams_as_it_trains(run):
    module = assembly_of(run).module(make_program(run).init(0).parameters)
    tokens = jnp.asarray(make_batch(run)["tokens"][:2, :20])
    state, logits = module.init_state(2, 20), []
    for token in tokens.T:
        of_token, state = module.step(token, state)
        logits.append(of_token)
    expected = jax.jit(module.logits)(tokens)
    np.testing.assert_allclose(np.stack(logits, 1), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_it_trains_goes_on_and_writes_text(folder):
    first = train(folder, "name=own", "steps=2", "sample_tokens=0", "mesh=2x2x1", "partition=mine")
    assert "step 2/2" in first
    resumed = ("resume=own", "steps=3", "sample_tokens=0")
    assert "training steps 3 to 3" in train(folder, *resumed)
    assert train(folder, "mode=generate", "resume=own", "sample_tokens=5", "prompt=def ").count("def ") == 1


def test_it_shows_its_axis_and_its_memory(folder):
    shown = train(folder, "mode=show", "mesh=2x2x1", "partition=mine", "partition.parameters.channels=[x]")
    assert "2 layers · 32 embed/y · 48 channels/x" in shown
    assert "expected memory" in shown


@pytest.mark.slow
@needs_libtpu
def test_it_compiles_for_a_slice(folder):
    shown = train(folder, "mode=compile", "target=v5e-4", "mesh=2x2x1", "partition=fsdp", "seq=128", "name=compiled")
    assert "predicted step" in shown
    assert json.loads((folder.parent / "runs" / "compiled" / "compile.json").read_text())["status"] == "ok"


@pytest.mark.slow
def test_it_sweeps(folder):
    train(folder, "-m", "name=swept", "mode=compile", "target=cpu4", "mesh=2x2x1", "partition=fsdp,mine")
    trials = TrialLog(folder.parent / "runs" / "swept").read()
    assert [trial.status for trial in trials] == [Status.ok] * 2


def test_a_gated_feed_forward_of_a_users_folder_trains(tmp_path):
    folder = write_folder(tmp_path)
    command = [sys.executable, "-m", "valkyrie.cli.train", "--config-dir", str(folder), *OWN_FEED_FORWARD]
    asked = ("steps=2", "sample_tokens=3", "mesh=2x2x1", "partition=units", "name=own", "log_every=1")
    done = subprocess.run([*command, *asked], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 2/2" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "runs" / "own" / "metrics.jsonl").read_text().splitlines()]
    assert [record["unit/size"] > 0 for record in records if "unit/largest" in record] == [True, True]
    asked = ("model.unit.units=0", "model.feed_forward_pattern=[unit,none]")
    refused = [subprocess.run([*command, a], cwd=tmp_path, capture_output=True, text=True, timeout=60) for a in asked]
    assert [done.returncode for done in refused] == [2, 2]
    assert "model.unit.units=0: at least 1 is needed" in refused[0].stderr
    assert "has the feed-forwards feed_forward, unit" in refused[1].stderr


def test_a_mistake_in_it_is_refused_by_its_own_words(folder):
    command = [sys.executable, "-m", "valkyrie.cli.train", "--config-dir", str(folder), *SMALL]
    done = subprocess.run(
        [*command, "model.gated_conv.width=0"], cwd=folder.parent, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (2, "valkyrie-train: model.gated_conv.width=0: at least 1 is needed.\n")
    done = subprocess.run([*command, "model.block_pattern=[s5]"], cwd=folder.parent, capture_output=True, text=True)
    assert done.stderr == (
        "valkyrie-train: model.block_pattern names s5, and model.family=gated_conv has the blocks gated_conv, "
        "attention.\n"
    )
