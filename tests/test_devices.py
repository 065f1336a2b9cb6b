"""Tests of choosing devices: simulated CPUs, the target's chips, and refusals."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from machines import needs_libtpu
from runs import ONE_DEVICE_ARGUMENTS, TINY_ARGUMENTS, run_train, start_training
from valkyrie.hardware.platforms import Platform
from valkyrie.hardware.platforms.gpu import Gpu
from valkyrie.problems import ProblemCode
from valkyrie.train import devices
from valkyrie.train.devices import Devices, acquire_devices, machine_problems


def fake_devices(size: int = 2, kind: str = "TPU v4", platform: str = "tpu") -> list[SimpleNamespace]:
    return [SimpleNamespace(device_kind=kind, platform=platform, id=i) for i in range(size)]


def compose_small_run(*overrides: str):
    from helpers import compose_run

    return compose_run(*overrides)


def test_simulated_devices_are_announced() -> None:
    devices = Devices(tuple(jax.devices()[:2]), "cpu", None, simulated=True)
    assert devices.note.startswith("SIMULATED: 2 CPU ")


COUNT_FLAG = "--xla_force_host_platform_device_count=8"


def test_a_mesh_uses_only_as_many_devices_as_its_size() -> None:
    devices = acquire_devices(compose_small_run("mesh=1x2x1"))
    assert len(devices.devices) == 2
    assert devices.simulated


def test_too_few_devices_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError) as caught:
        acquire_devices(compose_small_run("mesh=4x4x2", "partition=fsdp", "batch=32"))
    assert all(part in str(caught.value) for part in ("needs 32 devices", "8 x cpu", "mesh=1x1x8"))


def test_a_mesh_larger_than_the_first_of_a_process_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags, reason in (
        ("", "a new process"),
        (COUNT_FLAG, "Remove that flag"),
    ):
        monkeypatch.setenv("XLA_FLAGS", flags)
        with pytest.raises(ValueError, match=rf"^mesh=4x4x2 .*\b32 devices\b.*\b8 x cpu: .*{reason}"):
            acquire_devices(compose_small_run("mesh=4x4x2", "partition=fsdp", "batch=32"))


def test_other_chips_than_the_target_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda platform=None: fake_devices(4))
    with pytest.raises(ValueError) as caught:
        acquire_devices(compose_small_run("target=v5e-4", "mesh=1x2x2"))
    assert all(part in str(caught.value) for part in ("needs v5e chips", "x TPU v4", "target=auto"))


def test_a_chip_is_recognised_by_its_device_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda platform=None: fake_devices(4))
    devices = acquire_devices(compose_small_run("mesh=1x2x2"))
    assert devices.chip is not None and devices.chip.name == "v4"
    assert not devices.simulated
    assert devices.note.startswith("4 x TPU")


def test_a_tpu_slice_must_be_used_completely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda platform=None: fake_devices(4))
    with pytest.raises(ValueError) as caught:
        acquire_devices(compose_small_run("mesh=1x1x2"))
    assert "needs 2 devices" in str(caught.value)


def test_a_target_other_than_this_machine_is_refused_without_jax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # whatever accelerators this machine has are out of sight
    program = (
        "import sys; from valkyrie.cli.train import main\n"
        "try: main()\n"
        "finally: print('jax' in sys.modules, 'orbax' in sys.modules)"
    )
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", program, "target=v5e-8", "mesh=2x2x2"], cwd=tmp_path, capture_output=True, text=True
    )
    assert time.perf_counter() - start < 10
    assert result.returncode == 2
    assert result.stdout == "False False\n"
    assert result.stderr.startswith("valkyrie-train: target=v5e-8 ")
    assert "needs accelerators" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("target", "mode"), [("v5e-8", "compile"), ("h100-8", "compile")])
def test_the_modes_that_plan_without_the_devices_are_named(
    target: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "count_accelerators", lambda: 0)
    (problem,) = devices.device_problems(compose_small_run(f"target={target}", "mesh=2x2x2"))
    named_modes = {name for name in ("compile", "search") if f"mode={name}" in str(problem)}
    assert problem.key == "target" and named_modes == {mode}


def test_offloading_is_refused_if_the_devices_have_no_host_memory(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status = run_train(*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, f"runs={tmp_path}", "partition.optimizer_memory=host")
    assert status == 2
    stderr = capfd.readouterr().err
    assert "partition.optimizer_memory=host" in stderr and "partition.optimizer_memory=device" in stderr


@pytest.mark.slow
def test_a_laptop_can_simulate_32_devices(tmp_path: Path) -> None:
    arguments = ("model=valkyrie_tiny", "model.layers=2", "data=synthetic", "data.documents=400", "tracking=off")
    job = start_training(*arguments, "mesh=4x4x2", "partition=2d_tp", "steps=2", "sample_tokens=2", cwd=tmp_path)
    out, err = job.communicate(timeout=300)
    assert job.returncode == 0, err
    assert "SIMULATED: 32 CPU" in out
    assert "x=4 MP1" in out and "y=4 MP2" in out and "z=2 DP" in out
    assert "step 2/2  loss" in out
    assert err == ""


@pytest.mark.parametrize(
    ("plugins", "chips", "platforms", "has_driver", "expected"),
    [
        (["libtpu"], 0, "", False, True),
        (["libtpu"], 4, "", False, False),
        (["libtpu"], 0, "tpu", False, False),
        (["libtpu", "other"], 0, "", False, False),
        (["libtpu", "xla_cuda13"], 0, "", False, True),
        (["xla_cuda13"], 0, "", True, False),
        ([], 0, "", False, False),
    ],
)
def test_plugins_are_not_loaded_without_their_accelerators(
    monkeypatch: pytest.MonkeyPatch, plugins: list[str], chips: int, platforms: str, has_driver: bool, expected: bool
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(devices, "count_accelerators", lambda: chips)
    monkeypatch.setattr(devices, "_plugin_names", lambda: {*plugins} - {"libtpu"})
    monkeypatch.setattr(Platform, "is_installed", lambda self: not {*self.plugins}.isdisjoint(plugins))
    monkeypatch.setattr(Gpu, "has_driver", lambda self: has_driver)
    assert devices.only_idle_plugins() is expected


@pytest.mark.slow
@needs_libtpu
def test_a_training_on_a_laptop_prints_nothing_to_stderr(tmp_path: Path) -> None:
    arguments = (*TINY_ARGUMENTS, *ONE_DEVICE_ARGUMENTS, "steps=2", "optimizer.warmup_steps=1")
    process = start_training(*arguments, cwd=tmp_path, JAX_PLATFORMS="")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "SIMULATED" in out
    assert err == ""


@pytest.mark.parametrize(
    "error", [AssertionError(), RuntimeError("Unable to initialize backend 'x': no. (set JAX_PLATFORMS='')")]
)
def test_the_error_for_a_missing_platform_in_the_environment_names_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(platform: str | None = None) -> None:
        raise error

    monkeypatch.setattr(jax, "devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ValueError) as caught:
        acquire_devices(compose_small_run("mesh=1x1x1"))
    message = str(caught.value)
    assert message.startswith("JAX_PLATFORMS=cuda ") and "JAX_PLATFORMS=cpu" in message and "(set" not in message


def test_a_tpu_requested_by_the_environment_is_looked_for_without_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    monkeypatch.setattr(devices, "count_accelerators", lambda: 0)
    (problem,) = machine_problems(compose_small_run("mesh=1x1x1"))
    assert (problem.code, problem.key, problem.value) == (ProblemCode.missing, "JAX_PLATFORMS", "tpu")


def test_the_error_for_a_flag_that_would_abort_xla_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_nonsense=3 --xla_dump_to=x")
    (problem,) = machine_problems(compose_small_run("mesh=1x1x1"))
    assert (problem.code, problem.key) == (ProblemCode.unknown_name, "XLA_FLAGS") and "--xla_nonsense," in str(problem)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_dump_to=x")
    assert machine_problems(compose_small_run("mesh=1x1x1")) == []
