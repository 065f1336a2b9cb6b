"""Tests of the block in valkyrie/models/README.md, in a user's folder: training, streaming, compiling and sweeps."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import PARTITIONS, compose_run, make_batch, make_builder, make_program, run_steps
from machines import needs_libtpu
from own_feed_forward import SMALL_OVERRIDES as OWN_FEED_FORWARD
from own_feed_forward import write_folder
from own_folder import train_with, write_listings
from valkyrie.config.modes import ModeConfig
from valkyrie.config.run import Run
from valkyrie.data.config import DataConfig
from valkyrie.extensions import add_import_path
from valkyrie.hooks import check_hooks
from valkyrie.launch.engine import EngineConfig
from valkyrie.models import FAMILIES
from valkyrie.models.block import Block
from valkyrie.models.stack import Stack
from valkyrie.optim import OptimizerConfig
from valkyrie.sweep.trial import Status, TrialLog
from valkyrie.tasks import Task

ROOT = Path(__file__).parent.parent
SMALL = ("model=gated_conv_tiny", "model.embed=32", "model.mlp=64", "model.gated_conv.channels=48", "batch=8", "seq=48")
SMALL += ("model.attention.head_dim=8", "model.loss_chunk=16", "tracking=off")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder with the files listed in valkyrie/models/README.md and conf/README.md."""
    folder = tmp_path_factory.mktemp("own")
    assert write_listings(folder, *(ROOT / page / "README.md" for page in ("valkyrie/models", "conf"))) == [
        "count.py",
        "gated_conv.py",
        "mode/count.yaml",
        "model/gated_conv_tiny.yaml",
        "partition/mine.yaml",
    ]
    (folder / "count.py").unlink()  # another test's folder has a module of this name, and the process imports it once
    (folder / "mode" / "count.yaml").unlink()
    return folder


def train(folder: Path, *arguments: str) -> str:
    """Run `valkyrie-train` in a subprocess and return its output."""
    result = train_with(folder, *SMALL, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """The `Run` of the model in the user's folder, composed in this process."""
    add_import_path([folder])
    return compose_run(*SMALL, f"hydra.searchpath=[valkyrie://groups,{folder}]", "mesh=1x1x1", "partition=dp")


@pytest.mark.slow
@pytest.mark.parametrize("partition", [*PARTITIONS, "mine"])
def test_a_users_block_takes_the_same_steps_under_every_partition(folder, run, partition):
    mine = compose_run(*SMALL, f"hydra.searchpath=[valkyrie://groups,{folder}]", "mesh=2x2x2", f"partition={partition}")
    alone, together = run_steps(make_program(run), 2).metrics, run_steps(make_program(mine), 2).metrics
    for single, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other["loss"], single["loss"], rtol=2e-5)
        np.testing.assert_allclose(
            np.sqrt(other["squared_grad_norms"]), np.sqrt(single["squared_grad_norms"]), rtol=2e-4
        )


@pytest.mark.slow
def test_a_users_block_streams_the_logits_of_training(run):
    module = make_builder(run).module(make_program(run).init(0).parameters)
    tokens = jnp.asarray(make_batch(run)["tokens"][:2, :20])
    state, logits = module.init_state(2, 20), []
    for token in tokens.T:
        of_token, state = module.step(token, state)
        logits.append(of_token)
    expected = jax.jit(module.logits)(tokens)
    np.testing.assert_allclose(np.stack(logits, 1), expected, rtol=1e-4, atol=2e-5)


def test_a_users_block_trains(folder):
    assert "step 1/1" in train(folder, "name=trained", "steps=1", "sample_tokens=0", "mesh=2x2x1", "partition=mine")


@pytest.mark.slow
def test_a_users_block_trains_resumes_and_generates_text(folder):
    first = train(folder, "name=own", "steps=2", "sample_tokens=0", "mesh=2x2x1", "partition=mine")
    assert "step 2/2" in first
    resumed = ("resume=own", "steps=3", "sample_tokens=0")
    assert "steps 3 to" in train(folder, *resumed)
    assert train(folder, "mode=generate", "resume=own", "sample_tokens=5", "prompt=def ").count("def ") == 1


def test_mode_show_has_the_axis_and_memory_of_a_users_block(folder):
    output = train(folder, "mode=show", "mesh=2x2x1", "partition=mine", "partition.parameters.channels=[x]")
    assert "48 channels/x" in output
    assert "expected memory" in output


@pytest.mark.slow
@needs_libtpu
def test_a_users_block_compiles_for_a_slice(folder):
    output = train(folder, "mode=compile", "target=v5e-4", "mesh=2x2x1", "partition=fsdp", "seq=128", "name=compiled")
    assert "predicted step" in output
    assert json.loads((folder.parent / "runs" / "compiled" / "compile.json").read_text())["status"] == "ok"


@pytest.mark.slow
def test_a_users_block_can_be_swept(folder):
    train(folder, "-m", "name=swept", "mode=compile", "target=cpu4", "mesh=2x2x1", "partition=fsdp,mine")
    trials = TrialLog(folder.parent / "runs" / "swept").read()
    assert [trial.status for trial in trials] == [Status.ok] * 2


@pytest.mark.slow
def test_a_gated_feed_forward_of_a_users_folder_trains(tmp_path):
    folder = write_folder(tmp_path / "folder")
    settings = ("steps=2", "sample_tokens=3", "mesh=2x2x1", "partition=units", "name=own", "log_every=1")
    result = train_with(folder, *OWN_FEED_FORWARD, *settings)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step 2/2" in result.stdout
    records = [json.loads(line) for line in (tmp_path / "runs" / "own" / "metrics.jsonl").read_text().splitlines()]
    assert [record["unit/size"] > 0 for record in records if "unit/largest" in record] == [True, True]
    for setting, words in (
        ("model.unit.units=0", "model.unit.units=0: "),
        ("model.feed_forward_pattern=[unit,none]", "feed_forward, unit"),
    ):
        refusal = train_with(folder, *OWN_FEED_FORWARD, setting)
        assert refusal.returncode == 2 and words in refusal.stderr


@pytest.mark.slow
def test_mode_show_notes_an_axis_that_model_parallelism_does_not_split(folder):
    arguments = ("mode=show", "mesh=2x1x1", "model.gated_conv.channels=64", "log_every=1")
    noted, split = "note: partition=1d_tp has no rule for channels", "partition.parameters.channels=[x]"
    assert noted in " ".join(train(folder, *arguments, "partition=1d_tp").split())
    assert "has no rule for" not in train(folder, *arguments, "partition=1d_tp", split)


def test_checks_of_a_users_block_refuse_mistakes(folder):
    result = train_with(folder, *SMALL, "model.gated_conv.width=0")
    assert result.returncode == 2 and result.stderr.startswith("valkyrie-train: model.gated_conv.width=0: ")
    result = train_with(folder, *SMALL, "model.block_pattern=[s5]")
    assert "no block s5" in result.stderr and "gated_conv, attention" in result.stderr


@pytest.mark.slow
def test_earlier_names_are_refused(tmp_path):
    folder = write_folder(tmp_path / "folder")
    module = folder / "gated_unit.py"
    code = module.read_text()
    for base, member, name in (
        ("(Block):", "over_rows = True", "shards_rows_over_embed"),
        ("(Stack):", "def known_blocks(self): ...", "mixer_blocks"),
    ):
        module.write_text(code.replace(base, f"{base}\n    {member}\n"))
        refusal = train_with(folder, *OWN_FEED_FORWARD)
        assert refusal.returncode == 2 and f"{module}, line " in refusal.stderr and f"called {name}." in refusal.stderr


@pytest.mark.slow
def test_an_incomplete_block_is_refused(tmp_path):
    folder = write_folder(tmp_path / "folder")
    module = folder / "gated_unit.py"
    code = module.read_text()
    for old, new, message in (
        ("    axes =", "    _axes =", "units, which no block declares"),
        (
            '{"units": Size(',
            '{"unit": Size(',
            "units without a length",
        ),
        (
            "return check_range",
            "check_range",
            f"GatedUnit.problems() of {module} returned None",
        ),
        ("def sizes", "def size", f"{module}: GatedUnit has no `sizes`."),
    ):
        assert code.count(old) == 1
        module.write_text(code.replace(old, new))
        refusal = train_with(folder, *OWN_FEED_FORWARD, "mode=show")
        assert refusal.returncode == 2 and message in refusal.stderr, refusal.stderr


@pytest.mark.slow
def test_an_error_in_the_module_of_a_block_is_located(tmp_path):
    folder = write_folder(tmp_path / "folder")
    module = folder / "gated_unit.py"
    code = module.read_text()
    for old, new, status, message in (
        ("split(key, 3)", "split(key, 4)", 1, ", in __init__: ValueError: zip() argument 2 is longer than argument 1"),
        ('"bse,eu->bsu", x,', '"bse,eu->bsu", x[..., :16],', 1, ", in project_in: ValueError: Size of label 'e' for"),
        (
            'shard(product, "batch", "seq", "units")',
            'shard(product, "batch", "seq", "unit")',
            1,
            ", in project_in: unit is",
        ),
        (
            "numerics=self.numerics, name=name",
            "numerics=self.numeric, name=name",
            1,
            ", in project_in: AttributeError: ",
        ),
        (
            "return y,",
            "return y[..., :16],",
            2,
            "unit (FILE) returned (16, 48, 16). It must return an array of shape (batch, seq, embed) = (16, 48, 32).",
        ),
    ):
        assert code.count(old) == 1
        module.write_text(code.replace(old, new))
        refusal = train_with(folder, *OWN_FEED_FORWARD, "steps=1", "mesh=1x1x1", "model.layers=2")
        assert refusal.returncode == status and message.replace("FILE", str(module)) in refusal.stderr, refusal.stderr
        assert refusal.stderr.splitlines()[-1].startswith("valkyrie-train: ") and str(module) in refusal.stderr
        assert "Traceback" not in refusal.stderr


def test_wrong_problems_name_the_module_of_the_block(tmp_path):
    folder = write_folder(tmp_path / "folder")
    code, other_module = (folder / "gated_unit.py").read_text(), folder / "other_unit.py"
    other_module.write_text(code.replace("return check_range", "check_range"))
    config = "@dataclass\nclass Config"
    (folder / "gated_unit.py").write_text(code.replace(config, f"from other_unit import GatedUnit\n\n\n{config}"))
    refusal = train_with(folder, *OWN_FEED_FORWARD, "mode=show")
    assert f"GatedUnit.problems() of {other_module} returned None" in refusal.stderr, refusal.stderr
    other_module.write_text(code.replace("return 6.0", "6.0"))
    refusal = train_with(folder, *OWN_FEED_FORWARD, "mode=show")
    assert f"GatedUnit.flops() of {other_module} returned None, not a number." in refusal.stderr, refusal.stderr


def test_new_fields_may_have_an_earlier_name():
    with pytest.raises(ValueError, match="mixer_blocks"):
        type("Family", (Stack,), {"known_blocks": {}})
    type("Family", (Stack,), {"known_blocks": 2, "__annotations__": {"known_blocks": "int"}})


@pytest.mark.parametrize(
    ("base", "method", "signature"),
    [
        (Block, "flops", "(self, context, seq)"),
        (Stack, "flops_per_token", "(self, seq)"),
        (Task, "problems", "(self, model, seq)"),
        (DataConfig, "check", "(self, tokenizer, batch, seq, steps)"),
        (OptimizerConfig, "state_bytes", "(self, parameter)"),
        (ModeConfig, "run", "(self, run)"),
        (EngineConfig, "plan", "(self, overrides)"),
    ],
)
def test_methods_with_wrong_signatures_are_refused(base: type, method: str, signature: str):
    for function in (lambda self: 0, lambda self, a, b, c, d, e: 0):
        with pytest.raises(ValueError, match=f"{method} must take {re.escape(signature)}"):
            check_hooks(type("Config", (base,), {method: function, "__module__": __name__}))
    name = f"{method}_by_another_name"
    check_hooks(type("Config", (base,), {name: lambda self: 0, "__module__": __name__}))


def test_properties_and_methods_are_not_mistaken_for_each_other():
    with pytest.raises(ValueError, match=r"Unit\.auxiliary must be a property"):
        type("Unit", (Block,), {"auxiliary": lambda self: {}, "__module__": __name__})
    with pytest.raises(ValueError, match=r"Unit\.flops must be a method"):
        type("Unit", (Block,), {"flops": property(lambda self: 0.0), "__module__": __name__})
    type("Unit", (Block,), {"is_causal": False, "__module__": __name__})


@pytest.mark.parametrize(
    ("base", "method", "result", "expected"),
    [
        (Block, "sizes", None, "a dict of Size"),
        (Block, "sizes", {"channels": 48}, "a dict of Size"),
        (Block, "saves", [None], "a list of ActivationSpec"),
        (Block, "flops", "6", "a number"),
        (Task, "loss", np.zeros(3), "a BatchLoss"),
        (Task, "batch", [], "a dict of Array"),
        (DataConfig, "check", "100 tokens", "a DataCheck"),
        (OptimizerConfig, "rules", None, "a dict"),
        (EngineConfig, "problems", "wrong", "a list of strings"),
        (Stack, "segments", [1], "a list of tuples of 2 values"),
        (ModeConfig, "result_keys", "mesh", "a collection of strings or None"),
    ],
)
def test_results_of_a_wrong_type_are_refused(base: type, method: str, result: Any, expected: str):
    signature = inspect.signature(getattr(base, method)).parameters.values()
    config: Any = type(
        "Unit", (base,), {method: lambda *_, **__: result, "__module__": __name__, "__init__": object.__init__}
    )
    config.__abstractmethods__ = frozenset()
    check_hooks(config, lambda _: "unit=mine")
    named = {parameter.name: None for parameter in signature if parameter.kind is parameter.KEYWORD_ONLY}
    with pytest.raises(ValueError) as error:
        getattr(config(), method)(*[None] * (len(signature) - len(named) - 1), **named)
    assert f"Unit.{method}() of {__file__} returned " in str(error.value)
    assert str(error.value).endswith(f", not {expected}.")


class _PlainMixin:
    def problems(self) -> Any:
        return None


class _CheckedConfig(_PlainMixin, OptimizerConfig):
    @staticmethod
    def state_bytes(parameter: Any) -> Any:
        return parameter

    @classmethod
    def update_bytes(cls, parameter: Any) -> Any:
        return parameter


class _LayersConfig(Stack):
    @property
    def causal(self) -> Any:
        """Whether it is causal."""
        return vars(self)["is_causal"]

    @causal.setter
    def causal(self, value: Any) -> None:
        vars(self)["is_causal"] = value


def test_checked_methods_keep_their_kind_and_can_be_checked_again():
    for _ in range(2):
        check_hooks(
            _CheckedConfig, lambda config: f"unit={(config if isinstance(config, type) else type(config)).__name__}"
        )
    config: Any = object.__new__(_CheckedConfig)
    for caller in (config, _CheckedConfig):
        assert caller.state_bytes(4) == caller.update_bytes(4) == 4
        for name in ("state_bytes", "update_bytes"):
            with pytest.raises(
                ValueError, match=rf"^unit=_CheckedConfig: .*{name}\(\) .* returned '4', not a number of"
            ):
                getattr(caller, name)("4")


def test_checked_properties_keep_their_setter_and_docstring():
    for _ in range(2):
        check_hooks(_LayersConfig)
    config: Any = object.__new__(_LayersConfig)
    config.causal = True
    assert config.causal is True and _LayersConfig.causal.__doc__ == "Whether it is causal."
    config.causal = None
    with pytest.raises(ValueError, match=r"causal of .* returned None, not a bool"):
        _ = config.causal


def test_methods_of_a_mixin_are_checked_where_they_override_valkyries():
    check_hooks(_CheckedConfig)
    config: Any = object.__new__(_CheckedConfig)
    with pytest.raises(ValueError, match=r"_PlainMixin\.problems\(\) of .* returned None, not a list of Problem"):
        config.problems()
    unused_mixin = type("Last", (), {"state_bytes": lambda: 0, "__module__": __name__})
    check_hooks(type("Config", (OptimizerConfig, unused_mixin), {"__module__": __name__}))


def test_a_model_without_a_base_class_is_checked_against_the_protocol(tmp_path, monkeypatch):
    (tmp_path / "bare_model.py").write_text("class Config:\n    def problems(self): ...\n    family = 'bare_model'\n")
    (tmp_path / "flops_model.py").write_text("class Config:\n    def flops_per_token(self): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"^model\.family=bare_model: problems\(\) .* not a list of Problem"):
        FAMILIES.config_class("bare_model")().problems()
    with pytest.raises(ValueError, match=r"^model\.family=flops_model: .*flops_per_token must take \(self, seq\)"):
        FAMILIES.config_class("flops_model")


def test_a_users_mixer_that_is_not_causal_is_named(run, monkeypatch):
    assert not run.task.problems(run.model, 48)
    monkeypatch.setattr(type(run.model.gated_conv), "is_causal", False)
    (problem,) = run.task.problems(run.model, 48)
    assert "model.gated_conv" in str(problem) and "model.block_pattern" in str(problem)
    assert "model.attention" not in str(problem)


def test_results_of_the_declared_types_are_accepted():
    mode: Any = type("Mode", (ModeConfig,), {"result_keys": lambda self: {"mesh"}, "__module__": __name__})
    check_hooks(mode)
    assert mode.result_keys(None) == {"mesh"}
    layer: Any = type(
        "Unit", (Block,), {"flops": lambda self, context, seq: np.float32(6), "saves": lambda self, context: ()}
    )
    layer.__abstractmethods__ = frozenset()
    assert layer().flops(None, 1) == 6 and layer().saves(None) == ()
