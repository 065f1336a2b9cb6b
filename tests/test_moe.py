"""Tests of mixture-of-experts feed-forwards: routing, dispatch, capacity, losses and refusals."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import (
    assert_same_steps,
    compose_config,
    initial_state,
    leaves_by_name,
    make_program,
    mark_slow_except,
    randomize_zero_parameters,
    reference_steps,
    run_two_steps,
    small_overrides,
    small_run,
)
from valkyrie.axes import ROUTED_SHARE, UNSHARDED, GatheredRows
from valkyrie.config.arguments import parse_run
from valkyrie.config.run import Run
from valkyrie.machine.rows import gather_seconds, sort_seconds
from valkyrie.models.block import BlockContext
from valkyrie.models.dispatch import DispatchWork
from valkyrie.models.feed_forward import Nonlinearity
from valkyrie.models.layers import Boundaries
from valkyrie.models.moe import Dispatch, MoE
from valkyrie.models.moe_layer import MoELayer
from valkyrie.ops import grouped, grouped_triton
from valkyrie.ops.capacity import count_rows, limit_counts, move_dropped_rows, rows_after_dropping
from valkyrie.ops.choices import GroupScore, RouterScores
from valkyrie.ops.experts import grouped_linear
from valkyrie.ops.linear import FLOAT32, Numerics
from valkyrie.ops.routing import route
from valkyrie.parallel.candidates import Candidates
from valkyrie.parallel.mesh import build_mesh
from valkyrie.parallel.sharding import MeshShard
from valkyrie.problems import ProblemCode
from valkyrie.search.estimate.efficiency import chip_efficiency
from valkyrie.search.estimate.runs import estimate_runs
from valkyrie.search.estimate.work import step_work
from valkyrie.train.run_memory import estimated_memory, saved_bytes

EMBED, BATCH, SEQ = 8, 2, 12


def build(**settings):
    """Return a small block with these settings, its module, and a random input (batch, seq, embed)."""
    block = MoE(**({"experts": 4, "top_k": 2, "mlp": 6, "capacity_factor": None} | settings))
    module = block.build(BlockContext(EMBED, 2, key="model.moe"), numerics=FLOAT32, key=jax.random.key(1))
    return block, module, jax.random.normal(jax.random.key(0), (BATCH, SEQ, EMBED))


def randomize_biases(block: MoE, module) -> None:
    for i, name in enumerate(("router", *block.matrix_names) if block.biases else ()):
        bias = getattr(module, f"{name}_bias")
        bias[...] = 4 * jax.random.normal(jax.random.key(i), bias.shape)  # large enough for clamps to matter


def apply(module, x):
    return module(x, Boundaries(), UNSHARDED)


def apply_by_hand(block: MoE, module, x: np.ndarray) -> np.ndarray:
    """Return the output token by token, in float64. Every expert takes at most `block.capacity` tokens a sequence."""
    weights = {name: np.asarray(getattr(module, name)[...], np.float64) for name in ("router", *block.matrix_names)}

    def product(x, name, i):
        matrix = weights[name][i].T if name == "down" else weights[name][i]
        return x @ matrix + (np.asarray(getattr(module, f"{name}_bias")[i]) if block.biases else 0)

    def expert(token, i):
        up = product(token, "up", i)
        if not block.kind.is_gated:
            return product(np.maximum(up, 0), "down", i)
        gate, slope = product(token, "gate", i), 1.0
        if block.kind is Nonlinearity.clamped_swiglu:
            up, gate, slope = np.clip(up, -7, 7) + 1, np.minimum(gate, 7), 1.702
        return product(gate / (1 + np.exp(-slope * gate)) * up, "down", i)

    y, capacity = np.zeros(x.shape), block.capacity(x.shape[1])
    for row in range(x.shape[0]):
        counts = np.zeros(block.experts, int)
        for position, token in enumerate(np.asarray(x[row], np.float64)):
            logits = token @ weights["router"] + (np.asarray(module.router_bias[...]) if block.biases else 0)
            is_softmax = block.router is RouterScores.softmax
            scores = np.exp(logits) / np.exp(logits).sum() if is_softmax else 1 / (1 + np.exp(-logits))
            choice = scores + (np.asarray(module.selection_bias[...]) if block.selection_bias else 0)
            by_group = choice.reshape(block.groups, -1)
            group_scores = np.sort(by_group)[:, -2 if block.group_score is GroupScore.top_2 else -1 :].sum(-1)
            by_group[np.argsort(-group_scores)[block.top_groups :]] = -np.inf
            chosen = np.argsort(-choice)[: block.top_k]
            total = (scores[chosen].sum() if block.normalize else 1.0) / block.routed_scaling
            for i in chosen:
                before, after = (scores[i] / total, 1.0) if block.scale_inputs else (1.0, scores[i] / total)
                if counts[i] < capacity:
                    y[row, position] += after * expert(before * token, i)
                counts[i] += 1
    return y


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"normalize": True, "top_k": 3},
        {"router": RouterScores.sigmoid, "kind": Nonlinearity.relu, "top_k": 1, "scale_inputs": True},
        {"capacity_factor": 0.5, "dispatch": Dispatch.dense},
        {"kind": Nonlinearity.clamped_swiglu, "biases": True, "normalize": True},
        {"experts": 8, "groups": 4, "top_groups": 2, "routed_scaling": 2.5, "normalize": True},
        {"experts": 8, "groups": 2, "top_groups": 1, "group_score": GroupScore.max, "selection_bias": True, "top_k": 3},
    ],
)
def test_a_mixture_equals_a_calculation_token_by_token(settings):
    block, module, x = build(**settings)
    if block.selection_bias:
        module.selection_bias[...] = jnp.linspace(0.5, -0.5, block.experts)
    randomize_biases(block, module)
    y, values = jax.jit(apply)(module, x)
    np.testing.assert_allclose(y, apply_by_hand(block, module, x), rtol=1e-4, atol=1e-6)
    assert set(values) == set(block.auxiliary) and {v.shape for v in values.values()} == {(BATCH,)}
    if settings.get("capacity_factor") is None:
        np.testing.assert_allclose(values["dropped"], 0, atol=1e-7)
    else:
        assert np.all(values["dropped"] >= 1 - block.capacity_factor - 1e-6)


@pytest.mark.parametrize(("kind", "biases"), [(Nonlinearity.relu2, False), (Nonlinearity.clamped_swiglu, True)])
def test_dispatch_forms_have_the_same_values_and_gradients(kind, biases):
    def loss(module, x):
        y, values = apply(module, x)
        return jnp.sum(jnp.sin(y) * jnp.arange(EMBED)) + sum(value.sum() for value in values.values())

    results = []
    for dispatch in Dispatch:
        block, module, x = build(kind=kind, dispatch=dispatch, biases=biases)
        randomize_biases(block, module)
        value, gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(module, x)
        results.append((value, *jax.tree.leaves(gradients)))
    for arrays in zip(*results, strict=True):
        for array in arrays[1:]:
            np.testing.assert_allclose(array, arrays[0], rtol=2e-5, atol=2e-5 * np.abs(arrays[0]).max())
    assert len(results[0]) == 2 + (len(MoE(kind=kind).matrix_names) + 1) * (1 + biases)


@pytest.mark.parametrize(
    ("router", "logits"),
    [(RouterScores.sigmoid, [-1e4, -1e4 + 1, -1e4]), (RouterScores.softmax, [-1e4, -1e4 + 1, 0])],
)
def test_scores_of_0_are_divided_by_their_sum(router, logits):
    bias = jnp.array([1.0, 2.0, -1.0])  # chooses the first two experts

    def weights(logits):
        routing = route(logits, bias, top_k=2, router=router, normalize=True)
        return routing.weights, routing.probabilities

    chosen, probabilities = weights(jnp.array([[logits]]))
    np.testing.assert_allclose(chosen[0, 0], jax.nn.softmax(jnp.array([1.0, 0.0])), rtol=1e-5)
    np.testing.assert_allclose(probabilities.sum(), 1, rtol=1e-6)
    for i in range(2):
        gradient = jax.grad(lambda logits, i=i: weights(logits)[i][..., 0].sum())(jnp.array([[logits]]))
        assert np.all(np.isfinite(gradient))


def test_a_sorted_dispatch_has_no_scatter():
    _, module, x = build(dispatch=Dispatch.sorted)
    gradient = jax.jit(jax.grad(lambda module, x: apply(module, x)[0].sum(), argnums=(0, 1)))
    assert "scatter" not in gradient.lower(module, x).as_text()


@pytest.mark.parametrize("sizes", [[10, 0, 7, 2], [0, 0, 20, 0], [5, 5, 5, 1], [0, 0, 0, 0]])
def test_products_of_groups_multiply_the_rows_of_each_group_by_its_matrix_alone(sizes, monkeypatch):
    monkeypatch.setattr(grouped, "SMALLEST_TILE", 4)
    x, g, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(21, 3), (21, 5), (4, 3, 5)]))
    numbers = np.repeat(np.arange(4), sizes)
    used, loops = len(numbers), jnp.array(sizes, jnp.int32)
    x, g = (array.at[used:].set(jnp.nan) for array in (x, g))  # as `ragged_dot` may leave rows of no group on a TPU
    products, gradients = jax.jit(grouped.multiply_groups)(x, w, loops), np.zeros((4, 3, 5))
    np.testing.assert_allclose(products[:used], np.einsum("ra,rab->rb", x[:used], w[numbers]), rtol=1e-5, atol=1e-6)
    np.add.at(gradients, numbers, x[:used, :, None] * g[:used, None])
    sums = jax.jit(lambda *arrays: grouped.multiply_rows_of_groups(*arrays, "float32"))(x, g, loops)
    np.testing.assert_allclose(sums, gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(210, [10, 0, 130, 60]), (210, [0, 0, 200, 0]), (210, [67, 66, 67, 9]), (210, [0, 0, 0, 0]), (7, [1, 0, 1, 2])],
)
def test_kernels_of_gpus_equal_the_loops(rows, sizes, monkeypatch):
    shapes = [(rows, 72), (rows, 200), (4, 72, 200)]
    x, g, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    used, sizes = sum(sizes), jnp.array(sizes, jnp.int32)
    x, g = (array.at[used:].set(jnp.nan) for array in (x, g))
    for name in ("multiply_tiles", "sum_groups"):
        monkeypatch.setattr(grouped_triton, name, partial(getattr(grouped_triton, name), interpret=True))
    (products, sums), (expected, expected_sums) = (
        (grouped.multiply_groups(x, w, sizes, name), grouped.multiply_rows_of_groups(x, g, sizes, "float32", name))
        for name in ("gpu", "cpu")
    )
    np.testing.assert_allclose(products[:used], expected[:used], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(sums, expected_sums, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_products_of_groups_do_not_multiply_every_row_by_every_matrix(backend):
    x, w, sizes = jnp.ones((4096, 64)), jnp.ones((16, 64, 64)), jnp.full(16, 256, jnp.int32)
    gradients = str(jax.make_jaxpr(lambda x: grouped.multiply_rows_of_groups(x, x, sizes, "float32", backend))(x))
    products = str(jax.make_jaxpr(lambda x: grouped.multiply_groups(x, w, sizes, backend))(x))
    assert ("name=sum_groups" in gradients, "name=tgmm" in gradients) == (backend == "gpu", backend == "tpu")
    assert ("name=multiply_groups" in products, "ragged_dot" in products) == (backend == "gpu", backend == "tpu")
    # On a CPU, the number of steps is known only when it runs.
    assert ("while[" in products) == (backend == "cpu")


@pytest.mark.parametrize("result_itemsize", [2, 4])
@pytest.mark.parametrize(("inputs", "outputs"), [(2048, 1408), (1408, 2048), (4096, 14336), (7168, 2048), (96, 40)])
def test_tiles_of_the_tpu_kernel_fit_into_scratch_memory(inputs, outputs, result_itemsize):
    rows, columns, width = grouped.kernel_tiles(2**16, inputs, outputs, 2, result_itemsize)
    buffers = 2 * 2 * rows * (columns + width) + 2 * result_itemsize * columns * width
    assert buffers + 4 * columns * width <= 13 * 2**20
    for tile, length in ((columns, inputs), (width, outputs)):
        assert tile == length or tile % 128 == 0
        assert -(-length // tile) * tile <= 1.15 * length, "a tile beyond the end of the matrix is multiplied in vain"


def test_gradients_of_experts_are_summed_over_devices_in_the_reduction_dtype():
    numerics = Numerics("float32", "bfloat16", "bfloat16")
    x, w, sizes = jnp.ones((8, 3)), jnp.ones((2, 3, 5)), jnp.full((1, 2), 4, jnp.int32)

    def total(w):
        axes = ("experts", "embed", "mlp")
        settings = {"axes": axes, "output_first": False, "shard": UNSHARDED, "numerics": numerics}
        return grouped_linear(x, w, sizes, routed_share=1.0, **settings).sum()

    jaxpr = str(jax.make_jaxpr(jax.grad(total))(w))  # the first two dimensions of the partial sums are devices
    assert "bf16[1,1,2,3,5]" in jaxpr and "f32[1,1,2,3,5]" not in jaxpr.replace("bf16[", "")


def test_shared_experts_are_added_for_every_token():
    _, module, x = build(shared_experts=2)
    y, _ = apply(module, x)
    up, gate, down = (getattr(module, f"shared_{name}")[...] for name in ("up", "gate", "down"))
    hidden = jax.nn.silu(jnp.einsum("bse,enm->bsnm", x, gate)) * jnp.einsum("bse,enm->bsnm", x, up)
    module.shared_down[...] = 0 * down
    routed, _ = apply(module, x)
    np.testing.assert_allclose(y - routed, jnp.einsum("bsnm,enm->bse", hidden, down), rtol=1e-4, atol=1e-6)


def test_losses_and_metrics_of_a_balanced_and_a_collapsed_router():
    _, module, x = build(top_k=1)
    module.router[...] = jnp.zeros((EMBED, 4))
    collapsed = apply(module, x)[1]  # equal logits: the first expert gets every token
    np.testing.assert_allclose([collapsed["max_load"], collapsed["balance"]], [[4, 4], [1, 1]], rtol=1e-5)
    np.testing.assert_allclose(collapsed["entropy"], np.log(4), rtol=1e-5)
    np.testing.assert_allclose(collapsed["z"], np.log(4) ** 2, rtol=1e-5)
    module.router[...] = 50.0 * jnp.eye(EMBED, 4)
    balanced = apply(module, jnp.tile(jnp.eye(4, EMBED), (BATCH, SEQ // 4, 1)))[1]
    np.testing.assert_allclose([balanced["max_load"], balanced["balance"]], np.ones((2, BATCH)), rtol=1e-5)
    np.testing.assert_allclose(balanced["entropy"], 0, atol=1e-5)


@pytest.mark.parametrize(
    ("override", "key", "allowed"),
    [
        ("model.moe.top_k=9", "model.moe.top_k", 8),
        ("model.moe.top_k=0", "model.moe.top_k", 1),
        ("model.moe.experts=0", "model.moe.experts", 1),
        ("model.moe.capacity_factor=0", "model.moe.capacity_factor", 0),
        ("model.moe.scale_inputs=true", "model.moe.top_k", 1),
        ("model.moe.top_groups=2", "model.moe.top_groups", 1),
        ("model.moe.routed_scaling=0", "model.moe.routed_scaling", 0),
        ("model.dense_layers=5", "model.dense_layers", 4),
        ("optimizer.balance_rate=-1", "optimizer.balance_rate", 0),
    ],
)
def test_bad_settings_are_refused(override, key, allowed):
    (problem,) = Run.from_config(compose_config("model=moe_tiny", override)).problems()
    assert (problem.code, problem.key) == (ProblemCode.out_of_range, key)
    assert allowed in (problem.allowed.least, problem.allowed.most, problem.allowed.above)


@pytest.mark.parametrize("dispatch", list(Dispatch))
def test_a_capacity_that_drops_nearly_everything_is_refused_with_the_least_that_does_not(dispatch):
    def problems(capacity_factor, seq):
        block = MoE(experts=8, top_k=2, dispatch=dispatch, capacity_factor=capacity_factor)
        return block.sequence_problems(BlockContext(EMBED, 2, key="model.moe"), seq)

    (problem,) = problems(0.001, 1000)
    assert (problem.code, problem.key) == (ProblemCode.out_of_range, "model.moe.capacity_factor")
    assert "0.25 tokens" in problem.text and "at least 0.004, " in problem.text
    assert problems(0.004, 1000) == problems(0.5, 1) == problems(None, 1) == []
    assert problems(0.49, 8)


@pytest.mark.parametrize(
    ("settings", "key", "remedy"),
    [
        (["groups=3"], "groups", "model.moe.groups=2"),
        (["groups=8", "top_groups=2", "group_score=max", "top_k=3"], "top_groups", "model.moe.top_groups=3"),
        (["groups=8", "top_groups=2"], "group_score", "model.moe.group_score=max"),
    ],
)
def test_impossible_groups_are_refused(settings, key, remedy):
    overrides = [f"model.moe.{setting}" for setting in settings]
    (problem,) = Run.from_config(compose_config("model=moe_tiny", *overrides)).problems()
    assert problem.key == f"model.moe.{key}" and remedy in problem.text


@pytest.mark.parametrize(("dense_layers", "segment_count"), [(0, 1), (1, 1), (2, 2), (3, 2)])
def test_the_first_layers_are_dense_and_others_follow_the_pattern(dense_layers, segment_count):
    pattern = ("model.feed_forward_pattern=[feed_forward,moe]", "model.layers=8")
    model = small_run("moe_tiny", f"model.dense_layers={dense_layers}", *pattern).model
    has_experts = [layer.feed_forward_kind == "moe" for layer in model.make_layers()]
    assert has_experts == [i >= dense_layers and i % 2 == 1 for i in range(8)]
    assert len(model.segments()) == segment_count


def test_selection_biases_fall_for_experts_above_the_mean_load():
    block, module, x = build(top_k=1, selection_bias=True)
    module.router[...] = jnp.zeros((EMBED, 4)).at[:, 2].set(1e-3)
    x = jnp.abs(x)  # expert 2 has the highest score for every token
    gradient = jax.jit(jax.grad(lambda module: apply(module, x)[1]["bias"].sum()))(module).selection_bias[...]
    np.testing.assert_array_equal(np.sign(gradient), [-1, -1, 1, -1])
    assert np.linalg.norm(gradient) < 1e-4  # too small to change the gradient norm
    assert block.parameters(BlockContext(EMBED, 2))["selection_bias"].group == "balance"


def test_experts_that_the_mesh_does_not_divide_are_refused_with_the_nearest_legal_values():
    arguments = ("model=moe_tiny", "mesh=2x1x4", "partition=fsdp_ep", "model.moe.experts=6")
    (problem,) = parse_run(arguments).problems()
    assert (problem.code, problem.key) == (ProblemCode.not_divisible, "model.moe.experts")
    assert problem.nearest == (4, 8) and problem.legal_sizes == (1, 2)


def test_memory_and_gathers_of_experts_are_counted_once_per_device():
    specs = small_run("moe_tiny").model.parameters()
    weights = specs["segment_0.block_0.feed_forward.up"]
    for partition, stored, used in (("fsdp", 8, 1), ("fsdp_ep", 8, 2), ("1d_tp", 2, 2)):
        run = small_run("moe_tiny", "mesh=2x2x2", f"partition={partition}")
        layout = run.layout
        rules, sizes = (layout.parameters, layout.activations), {a: np.array([n]) for a, n in layout.mesh.axes.items()}
        ones = np.ones(1, np.int64)
        candidates = Candidates(layout.partition, *rules, run.arrays, sizes, {}, ones, ones)
        assert candidates.shard_elements(weights, "stored") == weights.size / stored
        assert candidates.shard_elements(weights, "used") == weights.size / used
        split_axes = {m for entry in layout.gathered_axes(weights.axes) for m in entry}
        assert set(candidates.gathered_mesh_axes(weights)) == split_axes


EXPERTS_AND_MLP = ("partition.parameters.mlp=[y]", "partition.activations.mlp=[y]")
EXPERTS_AND_MLP += ("partition.parameters.embed=[x,z]", "partition.activations.batch=[x,z]")
EXPERTS_OF_STAGES = ("partition.parameters.experts=[x]", "partition.activations.experts=[x]")
EXPERTS_OVER_ALL = ("partition.parameters.experts=[z,y]", "partition.activations.experts=[z,y]")
LAYOUTS = [(dispatch, f"partition={name}") for dispatch in ("dense", "sorted") for name in ("fsdp_ep", "ep_tp", "sp")]
LAYOUTS += [
    ("exchanged", "partition=fsdp_ep"),
    ("exchanged", "partition=ep_tp"),
    ("exchanged", "partition=fsdp"),
    ("exchanged", "partition=fsdp_ep", "partition.parameters.experts=[y,z]", "partition.activations.experts=[y,z]"),
    ("exchanged", "partition=fsdp_ep", *EXPERTS_AND_MLP),
    ("exchanged", "partition=fsdp_ep", "partition.activations.batch=[x,y]"),
    ("exchanged", "partition=fsdp_ep", "partition.activations.batch=[x,y]", *EXPERTS_OVER_ALL),
    ("exchanged", "mesh=2x1x2", "partition=fsdp_ep", "microbatches=2", "remat=full"),
    ("exchanged", "partition=pp_fsdp", "microbatches=2", *EXPERTS_OF_STAGES),
    ("sorted", "mesh=2x2x1", "partition=fsdp", "microbatches=2", "partition.sum_gradients_per=step"),
    ("sorted", "partition=fsdp", "partition.gradient_sum=all_to_all"),
    ("dense", "partition=sp", "partition.gradient_sum=all_to_all"),
    ("dense", "partition=fsdp", "partition.gradient_sum=all_to_all"),
    ("sorted", "mesh=2x1x2", "partition=fsdp_ep", "microbatches=2", "remat=full"),
    ("sorted", "mesh=1x1x8", "partition=fsdp_ep"),
    ("sorted", "partition=fsdp_ep", "partition.activations.batch=[x,y]", *EXPERTS_OVER_ALL),
    ("sorted", "partition=fsdp_ep", "partition.parameters.experts=[y,z]", "partition.activations.experts=[y,z]"),
    ("dense", "partition=fsdp_ep", *EXPERTS_AND_MLP),
    ("sorted", "partition=fsdp_ep", *EXPERTS_AND_MLP),
    ("sorted", "partition=fsdp_ep", "partition.activations.batch=[x,y]"),
    ("dense", "partition=pp_fsdp", "microbatches=2", *EXPERTS_OF_STAGES),
    ("sorted", "partition=pp_fsdp", "microbatches=2", *EXPERTS_OF_STAGES),
    ("sorted", "mesh=2x1x2", "partition=pp_fsdp", "microbatches=2", "partition.schedule=1f1b", "remat=full"),
]
LAYOUTS += [("sorted", "mesh=2x2x2", "partition=sp", "optimizer=muon")]
LIMITED_LAYOUTS = [
    (dispatch, f"model.moe.capacity_factor={capacity_factor}", "optimizer.balance_rate=0.001", *overrides)
    for dispatch in ("exchanged", "sorted")
    for capacity_factor, overrides in (
        (1.5, ["partition=fsdp_ep"]),
        (3, ["mesh=1x1x8", "partition=fsdp_ep"]),
        (2.5, ["partition=fsdp_ep", "partition.parameters.experts=[y,z]", "partition.activations.experts=[y,z]"]),
        (1.5, ["partition=fsdp_ep", *EXPERTS_AND_MLP]),
        (1.5, ["partition=fsdp_ep", "partition.activations.batch=[x,y]"]),
        (2.5, ["partition=fsdp_ep", "partition.activations.batch=[x,y]", *EXPERTS_OVER_ALL]),
        (1.8, ["mesh=2x1x2", "partition=fsdp_ep", "microbatches=2", "remat=full"]),
        (1.5, ["partition=sp", "partition.parameters.experts=[z]", "partition.activations.experts=[z]"]),
    )
]
"""Layouts with limited buffers, large enough that these steps drop nothing."""
LAYOUTS += LIMITED_LAYOUTS
QUICK_LAYOUTS = [("exchanged", "partition=fsdp_ep")]
BALANCE_SETTINGS = ("model.moe.selection_bias=true", "model.moe.router=sigmoid", "optimizer.balance_rate=0.25")


def selection_biases(steps) -> dict[str, np.ndarray]:
    parameters = leaves_by_name(jax.device_get(steps.state.parameters))
    return {name: value for name, value in parameters.items() if name.endswith("selection_bias")}


EXPERTS_OVER_Y = ("partition.parameters.experts=[y]", "partition.activations.experts=[y]")


@pytest.mark.parametrize("partition", [("data_model_fsdp",), ("2d_tp",), ("2d_tp", *EXPERTS_OVER_Y)])
def test_a_model_axis_of_one_device_is_allowed(partition):
    name, *overrides = partition
    make_program(small_run("moe_tiny", "mesh=2x1x2", f"partition={name}", *overrides)).lower_step()


@pytest.mark.parametrize("layout", mark_slow_except(LAYOUTS, QUICK_LAYOUTS), ids=lambda layout: "-".join(layout))
def test_every_dispatch_takes_the_same_steps_under_every_layout(layout):
    dispatch, *overrides = layout
    settings = [*BALANCE_SETTINGS, *(["model.moe.capacity_factor=1"] if dispatch == "dense" else [])]
    settings += [override for override in overrides if override.startswith("optimizer")]
    # On one device, `exchanged` is `sorted`.
    expected_settings = (*settings, f"model.moe.dispatch={'dense' if dispatch == 'dense' else 'sorted'}")
    expected = reference_steps("moe_tiny", *expected_settings)
    run = small_run("moe_tiny", *settings, f"model.moe.dispatch={dispatch}", "mesh=2x2x2", *overrides)
    state = randomize_zero_parameters(initial_state((*small_overrides("moe_tiny"), *expected_settings)))
    steps = run_two_steps(run, state)
    assert_same_steps(steps, expected)
    for metrics, expected_metrics in zip(steps.metrics, expected.metrics, strict=True):
        for name in ("balance", "z", "max_load", "dropped", "entropy"):
            np.testing.assert_allclose(metrics[f"moe/{name}"], expected_metrics[f"moe/{name}"], rtol=2e-5, atol=1e-7)
    assert (steps.metrics[0]["moe/dropped"] > 0.05) == (dispatch == "dense")
    biases, expected_biases = selection_biases(steps), selection_biases(expected)
    for name, value in expected_biases.items():
        np.testing.assert_array_equal(biases[name], value)
        assert value.shape == (run.model.layers, 8) and np.unique(value).size > 1
    assert expected_biases


def keep_assignments(experts: np.ndarray, block: MoE, devices: int) -> np.ndarray:
    """Return which assignments (batch, seq, top_k) fit into the buffers of devices that split batch and experts.

    A buffer keeps the same share of each sender's rows for each expert, those of the first tokens.
    """
    sequences, kept = experts.reshape(devices, -1), np.zeros(experts.size, bool).reshape(devices, -1)
    for first in range(0, block.experts, block.experts // devices):
        rows = count_rows(experts.size // block.top_k, block.top_k, block.experts, devices, block.capacity_factor)
        numbers = range(first, first + block.experts // devices)
        groups = [np.flatnonzero(sequence == expert) for expert in numbers for sequence in sequences]
        ends = np.cumsum([len(group) for group in groups]).astype(np.float32)
        share = min(np.float32(rows) / max(ends[-1], np.float32(1)), np.float32(1))
        kept_ends = np.where(ends == ends[-1], min(rows, ends[-1]), np.minimum(np.floor(ends * share), rows))
        for i, (group, count) in enumerate(zip(groups, np.diff(kept_ends, prepend=0).astype(int), strict=True)):
            kept[i % devices, group[:count]] = True
    return kept.reshape(experts.shape)


def apply_with_drops(devices):
    """Return a replacement of `MoELayer._apply_sorted` on one device that drops what `devices` devices would drop."""

    def apply(module, x, routing, shard):
        mask = jax.ShapeDtypeStruct(routing.experts.shape, bool)
        kept = jax.pure_callback(
            lambda n: keep_assignments(np.asarray(n), module.block, devices), mask, routing.experts
        )
        weights = jnp.sum(jnp.where(kept, routing.weights, 0)[..., None] * routing.one_hot, axis=2)
        up, gate, down = (getattr(module, name)[...] for name in ("up", "gate", "down"))
        hidden = jax.nn.silu(jnp.einsum("bse,nem->bsnm", x, gate)) * jnp.einsum("bse,nem->bsnm", x, up)
        y = jnp.einsum("bsnm,nem,bsn->bse", hidden, down, weights)
        return y, 1 - jnp.mean(kept, axis=(1, 2), dtype=jnp.float32)

    return apply


@pytest.mark.parametrize(
    ("dispatch", "devices", "capacity_factor", "kept"),
    [("sorted", 1, 1e-6, 8), ("exchanged", 2, 0.5, 32), pytest.param("sorted", 2, 0.5, 32, marks=pytest.mark.slow)],
)
def test_assignments_beyond_a_buffer_skip_their_experts(dispatch, devices, capacity_factor, kept, monkeypatch):
    _, module, x = build(capacity_factor=capacity_factor, dispatch=Dispatch(dispatch))
    run = small_run("moe_tiny", f"mesh=1x1x{devices}", "partition=fsdp_ep")
    shard = MeshShard(run.layout, build_mesh(run.config.mesh, jax.devices()))

    def differentiate(module, x, shard):
        def loss(module, x):
            y, values = module(x, Boundaries(), shard)
            return jnp.sum(jnp.sin(y) * jnp.arange(EMBED)), values["dropped"]

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(module, x)

    (value, dropped), gradients = differentiate(module, x, shard)
    monkeypatch.setattr(MoELayer, "_apply_sorted", apply_with_drops(devices))
    (plain_value, plain_dropped), plain_gradients = differentiate(module, x, UNSHARDED)
    np.testing.assert_allclose(dropped, plain_dropped, atol=1e-6)
    np.testing.assert_allclose(dropped.mean(), 1 - kept / (2 * BATCH * SEQ), atol=1e-6)
    np.testing.assert_allclose(value, plain_value, rtol=1e-5)
    for array, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(plain_gradients), strict=True):
        assert np.all(np.isfinite(array))
        np.testing.assert_allclose(array, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["exchanged", "sorted"])
@pytest.mark.parametrize("devices", [2, 8])
def test_steps_that_drop_assignments_equal_those_of_a_plain_calculation(dispatch, devices, monkeypatch):
    settings = ("model.moe.capacity_factor=0.875", f"model.moe.dispatch={dispatch}")
    state = randomize_zero_parameters(initial_state((*small_overrides("moe_tiny"), *settings)))
    steps = run_two_steps(small_run("moe_tiny", *settings, f"mesh=1x1x{devices}", "partition=fsdp_ep"), state)
    monkeypatch.setattr(MoELayer, "_apply_sorted", apply_with_drops(devices))
    expected = run_two_steps(small_run("moe_tiny", *settings), state)
    assert_same_steps(steps, expected)
    for metrics, expected_metrics in zip(steps.metrics, expected.metrics, strict=True):
        np.testing.assert_allclose(metrics["moe/dropped"], expected_metrics["moe/dropped"], rtol=1e-5)
        assert metrics["moe/dropped"] > 0.05


def test_a_buffer_keeps_the_same_share_of_the_rows_of_each_sender_and_expert():
    random = np.random.default_rng(0)
    for rows in (0, 1, 63, 150, 500):
        counts = random.integers(0, 40, (4, 3))
        kept = np.asarray(limit_counts(jnp.array(counts, jnp.int32), rows))
        share = min(rows / counts.sum(), 1)
        assert kept.sum() == min(rows, counts.sum()) and np.all(np.abs(kept - counts * share) <= 1)
        groups, positions = (jnp.array(counts.reshape(-1)), jnp.array(kept.reshape(-1))), jnp.arange(500)
        order = np.asarray(move_dropped_rows(positions, *groups))[: kept.sum()]
        new, is_kept = (np.asarray(array)[: counts.sum()] for array in rows_after_dropping(positions, *groups))
        np.testing.assert_array_equal(order, np.flatnonzero(is_kept))
        np.testing.assert_array_equal(new[order], np.arange(kept.sum()))


@pytest.mark.parametrize(
    ("tokens", "capacity_factor", "rows"),
    [(4096, None, 8192), (4096, 1, 2048), (4096, 1.25, 2560), (2**20, 1.1, 577024), (16, 1.25, 16), (4096, 9, 8192)],
)
def test_limited_buffers_have_whole_tiles(tokens, capacity_factor, rows):
    assert count_rows(tokens, 2, 8, 4, capacity_factor) == rows


EXPERT_BIAS_LAYOUTS = [
    ("sorted", "partition=fsdp_ep", *EXPERTS_AND_MLP),
    ("dense", "partition=fsdp_ep"),
    ("sorted", "partition=fsdp_tp"),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", EXPERT_BIAS_LAYOUTS, ids=str)
def test_biases_of_experts_take_the_same_steps_under_every_layout(layout):
    dispatch, *overrides = layout
    settings = ("model.moe.biases=true", "model.moe.kind=clamped_swiglu", f"model.moe.dispatch={dispatch}")
    state = randomize_zero_parameters(initial_state((*small_overrides("moe_tiny"), *settings)))
    steps = run_two_steps(small_run("moe_tiny", *settings, "mesh=2x2x2", *overrides), state)
    assert_same_steps(steps, reference_steps("moe_tiny", *settings))


def test_estimates_include_the_time_to_send_tokens_to_experts():
    arguments = ("mode=show", "model=moe_tiny", "target=v5e-8", "batch=256")
    run = parse_run(arguments)
    work = step_work(run)
    (sent,) = [mixing for mixing in work.mixing if mixing.dispatched]
    assert sent.dispatched_axes == ("experts",) and sent.dispatched[0].tensor.shape[2:] == (run.model.embed,)
    products = {product.name: product.count * product.rows_per_token for product in work.products}
    assert products["up"] == products["down"] == run.model.layers * run.model.moe.top_k


def estimate(*overrides):
    """Return the estimated parts of a step of moe_tiny on v5e-8, in seconds."""
    run = parse_run(["mode=show", "model=moe_tiny", "target=v5e-8", "mesh=2x2x2", "batch=256", *overrides])
    return estimate_runs([run], chip_efficiency(run.config.target.chip))[0]


def test_estimated_memory_of_sorted_experts_counts_the_rows_of_all_devices_along_their_axis():
    def saved(*overrides):
        run = parse_run(["mode=show", "model=moe_tiny", "target=v5e-8", "mesh=2x2x2", "batch=256", *overrides])
        return saved_bytes(run).device

    split, gathered, dense = (
        saved(*overrides)
        for overrides in (
            ["partition=fsdp_ep"],
            ["partition=fsdp"],
            ["partition=fsdp_ep", "model.moe.dispatch=dense", "model.moe.capacity_factor=1"],
        )
    )
    assert split["up"] == 2 * gathered["up"] and split["gate"] == 2 * gathered["gate"]
    assert dense["up"] == gathered["up"] and split["context"] == gathered["context"]
    for dispatch in ("sorted", "exchanged"):  # a token uses an expert once, although it uses two
        one_each = saved("partition=fsdp_ep", "mesh=1x1x8", f"model.moe.dispatch={dispatch}")
        assert one_each["up"] == 4 * gathered["up"]
        limited = ("partition=fsdp_ep", f"model.moe.dispatch={dispatch}", "model.moe.capacity_factor=1.25")
        assert saved(*limited)["up"] == saved(*limited, "mesh=1x1x8")["up"] == 1.25 * gathered["up"]


def test_estimated_memory_counts_the_tokens_that_devices_gather_for_their_experts():
    def peak(*overrides):
        settings = (
            "model=moe_tiny",
            "target=v5e-8",
            "batch=256",
            "partition=fsdp_ep",
            "model.moe.capacity_factor=1.25",
        )
        return estimated_memory(parse_run(["mode=show", *settings, *overrides])).activations

    tokens = 256 * 128 / 8
    gathered_bytes = [
        peak(mesh, "model.moe.dispatch=sorted") - peak(mesh, "model.moe.dispatch=exchanged")
        for mesh in ("mesh=2x2x2", "mesh=2x1x4")
    ]
    assert gathered_bytes == [devices * tokens * 128 * (2 + 4) for devices in (2, 4)]


def test_estimated_products_of_a_dense_dispatch_count_the_capacity_and_its_masks():
    dense = ("model.moe.dispatch=dense", "partition=fsdp")
    sorted_s, all_s, half_s = (
        estimate(*overrides) for overrides in (["partition=fsdp"], [*dense], [*dense, "model.moe.capacity_factor=1.25"])
    )
    assert all_s["products"] > 1.5 * half_s["products"] > 1.5 * sorted_s["products"]
    work = step_work(parse_run(["mode=show", "model=moe_tiny", *dense, "model.moe.capacity_factor=1.25"]))
    (mixing,) = [each for each in work.mixing if each.dispatched]
    assert mixing.dispatch == DispatchWork(mask_elements=8 * 40, sends_rows=True)  # 1.25 x 2/8 of 128 tokens
    assert {p.rows_per_token for p in work.products if p.stack[0]} == {2.5}


def test_estimates_multiply_the_rows_of_the_busiest_device():
    balanced_s, busy_s = (estimate("partition=fsdp_ep", f"target.routing_imbalance={n}") for n in (1, 2))
    assert 1.3 < busy_s["products"] / balanced_s["products"] < 2
    gathered = [estimate("partition=fsdp", f"target.routing_imbalance={n}")["products"] for n in (1, 2)]
    assert gathered[0] == gathered[1]


def test_estimates_gather_limited_rows_again_before_they_are_added_to_large_sums():
    def moved_per_token(target, batch):
        settings = ("mesh=1x1x8", "partition=fsdp_ep", "model.moe.capacity_factor=1.25", "remat=none")
        return estimate(*settings, f"target={target}", f"batch={batch}")["moving"] / batch

    assert moved_per_token("v5e-8", 4096) > 1.2 * moved_per_token("v5e-8", 256)
    assert moved_per_token("h100-8", 4096) < 1.1 * moved_per_token("h100-8", 256)


@pytest.mark.parametrize("target", ["v5e-8", "h100-8"])
def test_estimates_send_the_rows_of_the_busiest_device_as_far_as_its_buffer_holds_them(target):
    settings = (f"target={target}", "partition=fsdp_ep", "batch=4096", "model.moe.dispatch=exchanged")

    def sent(imbalance, *overrides):
        return estimate(*settings, f"target.routing_imbalance={imbalance}", *overrides)["activations"]

    assert sent(2) > 1.2 * sent(1)
    limited = "model.moe.capacity_factor=1.25"
    assert sent(1, limited) < sent(1.25, limited) == sent(2, limited)
    dense = ("model.moe.dispatch=dense", limited)
    assert sent(1, *dense) == sent(2, *dense)


def test_estimates_count_the_rows_of_limited_buffers_alone():
    wide = ("partition=fsdp_ep", "mesh=1x1x8", "model.moe.experts=64", "model.moe.top_k=8", "batch=2048")
    for dispatch in ("sorted", "exchanged"):
        least, all_rows = (
            estimate(*wide, f"model.moe.dispatch={dispatch}", f"model.moe.capacity_factor={n}") for n in (1, "null")
        )
        assert all_rows["moving"] > 2 * least["moving"] and all_rows["activations"] == least["activations"]
        assert all_rows["products"] == pytest.approx(least["products"], rel=0.2)  # a kernel skips unused rows
        on_gpus = [
            estimate(*wide, "target=h100-8", f"model.moe.dispatch={dispatch}", f"model.moe.capacity_factor={n}")
            for n in (1, "null")
        ]
        assert on_gpus[1]["products"] == pytest.approx(on_gpus[0]["products"], rel=0.2)


@pytest.mark.parametrize("dispatch", ["sorted", "exchanged"])
@pytest.mark.parametrize(("devices", "capacity_factor", "share"), [(1, 1.25, 1), (8, "null", 0.25), (4, 1.25, 0.8)])
def test_programs_say_which_share_of_the_rows_is_used(dispatch, devices, capacity_factor, share):
    settings = (f"model.moe.dispatch={dispatch}", f"model.moe.capacity_factor={capacity_factor}")
    run = small_run("moe_tiny", *settings, f"mesh=1x1x{devices}", "partition=fsdp_ep")
    shard = MeshShard(run.layout, build_mesh(run.config.mesh, jax.devices()))
    module = run.model.moe.build(BlockContext(EMBED, 1), numerics=FLOAT32, key=jax.random.key(1))
    program = jax.jit(lambda x: module(x, Boundaries(), shard)[0]).lower(jnp.ones((8, 48, EMBED)))
    shares = re.findall(f'{ROUTED_SHARE} = "([^"]*)"', program.as_text())
    assert set(shares) == {f"{share:g}"}


def test_an_imbalance_below_1_is_refused():
    arguments = ("mode=show", "model=moe_tiny", "target=v5e-8", "target.routing_imbalance=0.5")
    assert [problem.key for problem in parse_run(arguments).problems()] == ["target.routing_imbalance"]


def test_estimates_include_sorts_and_gathers_of_rows():
    (mixing,) = [each for each in step_work(parse_run(["mode=show", "model=moe_tiny"])).mixing if each.dispatched]
    assert mixing.dispatch == DispatchWork(rows=2, gathered_rows=GatheredRows("experts", 4))
    exchanged = ("partition=fsdp_ep", "model.moe.dispatch=exchanged")
    assert estimate(*exchanged)["moving"] > estimate("partition=fsdp_ep")["moving"]
    assert estimate(*exchanged)["activations"] < estimate("partition=fsdp_ep")["activations"]
    run = parse_run(["mode=show", "model=moe_tiny", "target=v5e-8"])
    chip, rows = run.config.target.chip, 256 * 128 * 2 / 8
    least_s = run.model.layers * 4 * gather_seconds(rows, 128, 2, chip)
    assert least_s < estimate("partition=fsdp")["moving"] < estimate("partition=fsdp_ep")["moving"]
    assert gather_seconds(rows, 256, 2, chip) > gather_seconds(rows, 128, 2, chip) > sort_seconds(rows, chip)
    gpu = parse_run(["mode=show", "model=moe_tiny", "target=h100-8"]).config.target.chip
    assert gather_seconds(rows, 128, 2, gpu) < gather_seconds(rows, 128, 2, chip)


def test_a_switch_carries_each_row_of_an_all_to_all_once():
    settings = ("target=h100-8", "model.embed=2048", "batch=2048")
    seconds = {}
    for devices in (2, 4, 8):
        layout = (f"mesh=1x{8 // devices}x{devices}", "partition=fsdp_ep", "model.moe.dispatch=exchanged")
        run = parse_run(["mode=show", "model=moe_tiny", *settings, *layout])
        seconds[devices] = estimate_runs([run], chip_efficiency(run.config.target.chip))[0]["activations"]
    assert seconds[8] / seconds[2] == pytest.approx((7 / 8) / (1 / 2), rel=0.1)
    assert seconds[8] / seconds[4] == pytest.approx((7 / 8) / (3 / 4), rel=0.1)


@pytest.mark.parametrize("shared", [1, 2])
def test_products_of_shared_experts_have_their_own_names(shared):
    run = parse_run(["mode=show", "model=moe_tiny", f"model.moe.shared_experts={shared}"])
    products = {product.name: product for product in step_work(run).products}
    assert products["gate"].stack == ("experts", 8) and products["shared_gate"].stack == (None, 1)
    assert not products["shared_down"].is_needed_backward and not products["down"].is_needed_backward


def test_flops_count_active_experts_and_memory_counts_all():
    model = small_run("moe_tiny").model
    more = small_run("moe_tiny", "model.moe.experts=16").model
    router = 2 * model.embed * 8 * model.layers
    assert more.flops_per_token(48) - model.flops_per_token(48) == router
    assert more.parameter_count() - model.parameter_count() == 8 * model.layers * model.embed * (3 * model.moe.mlp + 1)
