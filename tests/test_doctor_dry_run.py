"""Tests of `valkyrie-doctor`'s dry run: it finds NaNs, unequal replicas, and wrong or slow sums."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from helpers import compose_run
from runs import TINY_ARGUMENTS
from valkyrie.doctor import dry_run
from valkyrie.doctor.findings import FAILURE, OK, WARNING, Finding
from valkyrie.parallel.mesh import build_mesh
from valkyrie.processes.team import ALONE
from valkyrie.train.devices import Devices


def simulated_devices() -> Devices:
    """Return the simulated CPU devices of the tests, as the doctor's `Devices`."""
    return Devices(tuple(jax.devices()), "cpu", None, simulated=True)


def dry_run_findings(*overrides: str) -> dict[str, Finding]:
    """Return the findings of a dry run of three steps, by check name."""
    run = compose_run(*TINY_ARGUMENTS, *overrides)
    return {finding.check: finding for part in dry_run.dry_run(run, simulated_devices(), 3, ALONE) for finding in part}


@pytest.mark.parametrize(
    ("mesh", "partition", "axes"),
    [("1x2x1", "dp", "y"), pytest.param("2x2x2", "2d_tp_fsdp", "xyz", marks=pytest.mark.slow)],
)
def test_a_dry_run_of_a_healthy_run_has_no_failures(mesh: str, partition: str, axes: str):
    findings = dry_run_findings(f"mesh={mesh}", f"partition={partition}")
    assert set(findings) == {*(f"axis {axis}" for axis in axes), "compile", "steps", "replicas"}
    assert {finding.severity for finding in findings.values()} == {OK}
    assert "over y=2 " in findings["axis y"].text and findings["axis y"].text.endswith(" ms (simulated)")
    assert "stay finite for 3 steps" in findings["steps"].text and " loss 5." in findings["steps"].text
    assert "bitwise equal" in findings["replicas"].text


@pytest.mark.slow
def test_a_nan_is_found_with_its_step():
    finding = dry_run_findings(
        "mesh=2x2x2", "partition=fsdp", "optimizer.learning_rate=1e30", "optimizer.clip_norm=null"
    )["steps"]
    assert (
        finding.severity == FAILURE
        and finding.text.startswith(("step 2: loss", "step 3: loss"))
        and "nan" in finding.text
    )


def make_replicas(device_values: list[float]) -> jax.Array:
    """Return a replicated array of shape (2,). Its copy on device i is filled with `device_values[i]`."""
    mesh = jax.make_mesh((len(device_values),), ("x",), devices=jax.devices()[: len(device_values)])
    parts = [jax.device_put(np.full(2, v, np.float32), d) for v, d in zip(device_values, jax.devices(), strict=False)]
    return jax.make_array_from_single_device_arrays((2,), NamedSharding(mesh, PartitionSpec()), parts)


def test_a_differing_replica_is_found_with_its_device():
    equal_replicas = make_replicas([1.0, 1.0, 1.0, 1.0])
    assert dry_run.compare_replicas({"a": equal_replicas}, ALONE).severity == OK
    finding = dry_run.compare_replicas({"a": equal_replicas, "b": make_replicas([1.0, 1.0, 1.0000001, 1.0])}, ALONE)
    assert finding.severity == FAILURE and finding.text.startswith("b on device") and "device 2" in finding.text
    assert dry_run.compare_replicas({"a": make_replicas([float("nan")] * 4)}, ALONE).severity == OK


def test_shards_of_an_array_are_not_compared_as_replicas():
    mesh = jax.make_mesh((8,), ("x",))
    array = jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec("x")))
    assert dry_run.compare_replicas({"a": array}, ALONE).text.startswith("no parameter")


def test_a_wrong_or_slow_sum_is_found(monkeypatch: pytest.MonkeyPatch):
    mesh = build_mesh(compose_run(*TINY_ARGUMENTS, "mesh=2x1x1").config.mesh, jax.devices())
    monkeypatch.setattr(dry_run, "_time_sum", lambda mesh, axis: (0.2, True))
    assert [f.severity for f in dry_run.time_axes(mesh, False)] == [WARNING]
    assert [f.severity for f in dry_run.time_axes(mesh, True)] == [OK]
    monkeypatch.setattr(dry_run, "_time_sum", lambda mesh, axis: (0.001, False))
    assert dry_run.time_axes(mesh, True)[0].severity == FAILURE


def test_a_run_that_is_too_large_is_found_before_it_compiles(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("valkyrie.train.room.free_memory", lambda: 1000)
    run = compose_run(*TINY_ARGUMENTS, "mesh=2x1x1", "partition=dp")
    finding_groups = dry_run.dry_run(run, simulated_devices(), 3, ALONE)
    next(finding_groups)
    (finding,) = next(finding_groups)
    finding_groups.close()
    assert (finding.check, finding.severity) == ("memory", FAILURE) and "parameters, optimizer state" in finding.text
