"""Tests of platforms: their names, lookup without JAX, and refusals."""

from __future__ import annotations

import subprocess
import sys

import pytest

from valkyrie.hardware.platforms import Platform, get_platform, platforms
from valkyrie.hardware.target import ChipConfig, TargetConfig


def test_a_platform_is_found_by_its_name_and_its_backend_names() -> None:
    assert [platform.name for platform in platforms()] == ["any", "cpu", "gpu", "tpu"]
    assert get_platform("cuda") is get_platform("gpu")
    with pytest.raises(ValueError, match="platform=abacus"):
        get_platform("abacus")


@pytest.mark.parametrize("platform", platforms(), ids=lambda platform: platform.name)
def test_simulated_devices_are_cpu_devices(platform: Platform) -> None:
    expected = {"any": (True, False), "cpu": (True, True)}.get(platform.name, (False, False))
    assert (platform.is_simulated(0), platform.is_simulated(4)) == expected


def test_the_refusal_of_an_unknown_platform_names_its_key() -> None:
    for problems, key in (
        (TargetConfig(platform="abacus").problems(), "target.platform"),
        (ChipConfig(platform="abacus").problems(), "target.chip.platform"),
    ):
        (problem,) = problems
        assert (problem.key, problem.value) == (key, "abacus") and str(problem).endswith("cpu, gpu, tpu.")


def test_platforms_do_not_import_jax() -> None:
    code = "import sys; from valkyrie.hardware.platforms import platforms; platforms(); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
