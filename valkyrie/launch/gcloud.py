"""Names of resources and slices on Google Cloud."""

from __future__ import annotations

import re

from valkyrie.hardware.target import TargetConfig


def has_usual_shape(target: TargetConfig) -> bool:
    """Return whether a slice has the default topology for its size. Its name then ends in the size, as in `v4-64`."""
    return target.name.rpartition("-")[2].isdecimal()


def accelerator_type(target: TargetConfig) -> str:
    """Return gcloud's accelerator type of a slice with the default topology, such as `v4-64` or `v5litepod-8`."""
    assert target.chip is not None
    return tpu_generation(target) + target.name.removeprefix(target.chip.name)


def tpu_generation(target: TargetConfig) -> str:
    """Return gcloud's name of the TPU generation, such as `v4` or `v5litepod`."""
    assert target.chip is not None
    return target.chip.rented_as.get("tpu_vm_type", target.chip.name)


def resource_name(name: str) -> str:
    """Convert a name to one that Google Cloud and Kubernetes accept.

    The result has at most 40 lowercase letters, digits and dashes, and starts with a letter.
    """
    plain_name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain_name if plain_name[:1].isalpha() else f"run-{plain_name}")[:40].rstrip("-")
