"""Tests of settings of the model that a search varies: those that blocks declare, and `mode.vary`."""

from __future__ import annotations

import shlex
from collections import Counter

import pytest

from helpers import shared_run
from valkyrie.axes import EXPERTS
from valkyrie.config.arguments import parse_run
from valkyrie.models import layer_blocks
from valkyrie.problems import ProblemError
from valkyrie.search.answer import rank_layouts, train_command
from valkyrie.search.compiling import CompiledLayouts
from valkyrie.search.estimate.efficiency import chip_efficiency
from valkyrie.search.estimate.rank import Ranking, rank
from valkyrie.search.estimate.runs import estimate_runs
from valkyrie.search.request import SearchRequest, parse_request
from valkyrie.search.shortlist import build_shortlist
from valkyrie.train.run_memory import estimated_memory

EXCHANGED = "model.moe.dispatch=exchanged"
LIMITED = "model.moe.capacity_factor=1.25"


def search(*arguments: str) -> tuple[SearchRequest, Ranking]:
    """Return the request of a search of `moe_tiny` and its ranked layouts."""
    request = parse_request(shared_run("mode=search", "target=v5e-8", "model=moe_tiny", "batch=256", *arguments))
    return request, rank(request.run, request.space())


def tried_settings(*arguments: str) -> list[tuple[str, ...]]:
    """Return the settings of the model that a search of `moe_tiny` tries."""
    return [settings.overrides for settings in search("partition=fsdp_ep", "mesh=1x1x8", *arguments)[0].settings]


def test_a_search_tries_every_dispatch_where_experts_are_split() -> None:
    _, ranking = search("remat=full", "microbatches=1")
    split = Counter[tuple[str, ...]]()
    for group in ranking.space.groups:
        sizes = group.candidates.axes_size(group.candidates.stored_axes(EXPERTS))
        split[group.settings.overrides] += int((sizes > 1).sum())
        assert group.settings.overrides == () or (sizes > 1).all(), "elsewhere, both are the same program"
        assert all(EXCHANGED in group.candidate(0, remat).overrides for remat in group.remats if group.settings.model)
    assert split[(EXCHANGED,)] == split[()] > 0


def test_estimates_and_commands_of_a_row_have_its_settings() -> None:
    vary = "mode.vary.model.moe.capacity_factor=[1.25,null]"
    request, ranking = search("partition=fsdp_ep", "mesh=1x1x8", "remat=none", "microbatches=1", vary)
    rows = rank_layouts(request, build_shortlist(ranking), CompiledLayouts(), 10)
    estimates = {}
    for row in rows:
        command = shlex.split(train_command(request, row))
        assert not any(word.startswith("mode.vary") for word in command)
        run = parse_run(command[1:])
        assert run.config.target.chip is not None
        (estimate,) = estimate_runs([run], chip_efficiency(run.config.target.chip))
        assert row.step_s == pytest.approx(estimate["step"]) and row.memory == estimated_memory(run).total
        estimates[row.candidate.settings] = row.step_s
    assert set(estimates) == {(), (LIMITED,), (EXCHANGED,), (EXCHANGED, LIMITED)}
    assert estimates[(LIMITED,)] < estimates[()] and estimates[(EXCHANGED, LIMITED)] < estimates[(EXCHANGED,)]


@pytest.mark.parametrize(
    ("arguments", "tried"),
    [
        ([EXCHANGED], [()]),
        ([LIMITED], [(), (EXCHANGED,)]),
        (["model.moe.dispatch=dense", LIMITED], [()]),
        (["mode.vary.model.moe.dispatch=[exchanged]"], [(EXCHANGED,)]),
        (["mode.vary.model.moe.dispatch=[dense,sorted]"], [(), ("model.moe.dispatch=dense",)]),
        ([EXCHANGED, "mode.vary.model.moe.capacity_factor=[1.25]"], [(LIMITED,)]),
    ],
)
def test_settings_of_the_command_are_not_varied_without_a_list(arguments, tried) -> None:
    assert tried_settings(*arguments) == tried


def test_a_dense_dispatch_without_a_limit_is_compared_in_all_layouts() -> None:
    block, context = layer_blocks(parse_run(["mode=show", "model=moe_tiny", "model.moe.dispatch=dense"]).model)[1]
    (alternatives,) = block.alternatives(context)
    assert [value.value for value in alternatives.values] == ["dense", "sorted", "exchanged"]
    assert alternatives.key == "model.moe.dispatch" and alternatives.axis is None


def test_values_with_equal_estimates_are_listed_once_each() -> None:
    layout = ("partition=fsdp", "mesh=8x1x1", "remat=none", "microbatches=1", "model=gpt_125m", "batch=32")
    _, ranking = search(*layout, "mode.vary.model.attention.impl=[auto,chunked,chunked]")
    assert sorted(layout.group.settings.overrides for layout in ranking) == [(), ("model.attention.impl=chunked",)]


def test_a_dense_model_has_one_setting() -> None:
    request = parse_request(shared_run("mode=search", "target=v5e-8", "model=gpt_tiny", "batch=32"))
    assert [settings.overrides for settings in request.settings] == [()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mode.vary.model.layers=[2,4]"], "mode.vary: model.layers=2 changes the shapes of parameters"),
        (["mode.vary.model.name=[a,b]"], "mode.vary.model.name: this names a model"),
        (["mode.vary.model.moe.foo=[2]"], "mode.vary.model.moe.foo: 2: Key 'foo' not in 'MoE'"),
        (["mode.vary.model.moe.dispatch=[other]"], "mode.vary.model.moe.dispatch: other: Invalid value 'other'"),
        (["mode.vary.model.moe.capacity_factor=[0.001]"], "model.moe.capacity_factor=0.001 has room for 0.032 tokens"),
        (["mode.vary.model.moe.capacity_factor=[-1]"], "model.moe.capacity_factor=-1: must be above 0"),
        ([EXCHANGED, "mode.vary.model.moe.dispatch=[sorted]"], "model.moe.dispatch= cannot be combined with mode.vary"),
    ],
)
def test_bad_values_are_refused(arguments, message) -> None:
    with pytest.raises((ValueError, ProblemError), match="^" + message.replace(".", r"\.")):
        tried_settings(*arguments)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("mode.vary.model.moe.capacity_factor=1.25", "must be a list"),
        ("mode.vary.batch=[2]", "batch is no setting of the model"),
    ],
)
def test_values_must_be_a_list_for_a_setting_of_the_model(argument: str, reason: str) -> None:
    (problem,) = parse_run(["mode=search", "model=moe_tiny", argument]).problems()
    assert problem.key == argument.partition("=")[0] and reason in problem.text
