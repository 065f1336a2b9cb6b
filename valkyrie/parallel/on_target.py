"""Checks that a mesh and a precision suit the target, and suggests alternatives. Does not import JAX."""

from __future__ import annotations

from valkyrie.hardware.platforms import get_platform
from valkyrie.hardware.slices import parse_shape
from valkyrie.hardware.target import TargetConfig
from valkyrie.parallel.mesh import MeshConfig
from valkyrie.precision import PolicyConfig
from valkyrie.problems import Problem, ProblemCode
from valkyrie.units import count_text


def target_problems(target: TargetConfig, mesh: MeshConfig) -> list[Problem]:
    """Return the problems of a target, or a problem if the mesh and the target differ in devices or slices.

    A target without a number of devices fits every mesh. Slices are not compared if `mesh.placement` is set, or if the
    target is a single slice without a topology.
    """
    problems = target.problems()
    if problems or target.devices is None:
        return problems
    if target.devices != mesh.size:
        text = _wrong_size_message(target, mesh)
        return [Problem(ProblemCode.device_count, "mesh", mesh.name, text, size=mesh.size, parts=target.devices)]
    if mesh.slices > 1 == target.slices and target.topology and mesh.placement is None:
        text = (
            f"mesh={mesh.name} spans {mesh.slices} slices, joined by the data-centre network, but "
            f"target={target.describe()} is a single slice.{_slices_hint(target, mesh)} For one slice, use a mesh "
            f"such as mesh={_torus_mesh_name(target)}."
        )
        return [Problem(ProblemCode.slice_count, "mesh", mesh.name, text, size=mesh.slices, parts=1)]
    if 1 < target.slices != mesh.slices and mesh.placement is None:
        text = (
            f"target.slices={target.slices}, but mesh={mesh.name} spans {count_text(mesh.slices, 'slice')}. Use "
            f"mesh={target.slices}s{_torus_mesh_name(target)}, or set mesh.placement."
        )
        return [Problem(ProblemCode.slice_count, "target.slices", target.slices, text, size=mesh.slices)]
    return []


def product_problems(target: TargetConfig, precision: PolicyConfig) -> list[Problem]:
    """Return a problem if the chip cannot multiply the dtype of `precision.products` and its platform refuses that."""
    chip, products = target.chip, precision.products
    if products is None or chip is None or get_platform(chip.platform).converts_unlisted_products:
        return []
    dtype = products.value
    if dtype in chip.peak_tflops:
        return []
    text = (
        f"precision.products={dtype}: {chip.name} has no such matrix products, and XLA would compute them in "
        f"{precision.compute.value}. Use precision=bf16_mixed or another chip. If the chip has them, set "
        f"target.chip.peak_tflops.{dtype}."
    )
    return [Problem(ProblemCode.conflict, "precision.products", dtype, text)]


def _wrong_size_message(target: TargetConfig, mesh: MeshConfig) -> str:
    """Return the message for a mesh and a target with different numbers of devices.

    Suggests a mesh of the target's size, and targets of the mesh's size or, if there are none, of the nearest sizes. A
    suggested target has as many slices as the mesh.
    """
    chips, devices_per_chip = (target.chips or 0) * target.slices, target.chip.devices if target.chip else 1
    noun = "chip" if target.chip and devices_per_chip == 1 else "device"
    target_size = count_text(chips, "chip" if devices_per_chip > 1 else noun)
    target_size += f" with {devices_per_chip} JAX devices{' each' * (chips > 1)}" if devices_per_chip > 1 else ""
    if target.chip and target.chip.units_in_name > 1 and target.name.endswith(f"-{mesh.size}"):
        target_size += f" ({target.name} counts {target.chip.units_in_name} cores per chip)"
    if target.slices > 1 and not target.topology and (single := target.resized(target.devices or 0)):
        target_size += f" (the same as target={single.name})"  # without a torus, a network joins all hosts anyway
    slice_prefix = f"{target.slices}s" if target.slices > 1 else ""
    mesh_hint = f", such as mesh={slice_prefix}{_torus_mesh_name(target)}" if target.chip and target.topology else ""
    slice_count = mesh.slices if target.topology else 1  # a network joins all hosts of a target without a torus
    slice_size = mesh.size // slice_count

    def request(other: TargetConfig) -> str:
        if slice_count == target.slices:
            return f"target={other.describe()}"
        return f"target={other.name} target.slices={slice_count}"

    resized_target = target.resized(slice_size)
    nearest = " and ".join(map(request, target.nearest_slices(slice_size)))
    fitting_hint = f" No slice has {count_text(slice_size, noun)}. Nearest: {nearest}." if nearest else ""
    mesh_remedy = f"a mesh of {count_text(target.devices or 0, 'device')}{mesh_hint}."
    remedy = f" Use {mesh_remedy}" if resized_target is None else f" Use {request(resized_target)}, or {mesh_remedy}"
    if slices_hint := _slices_hint(target, mesh):
        fitting_hint, remedy = slices_hint, f" Or use {mesh_remedy}"
    elif resized_target is not None:
        fitting_hint = ""
    return (
        f"target={target.describe()} has {target_size}, but mesh={mesh.name} needs {count_text(mesh.size, 'device')}."
        f"{fitting_hint}{remedy}"
    )


def _slices_hint(target: TargetConfig, mesh: MeshConfig) -> str:
    """Return a sentence that suggests a target with as many slices as the mesh.

    Returns an empty string if the target has no topology, if the mesh has one slice or the same number as the target,
    or if no slice has `mesh.size / mesh.slices` devices.
    """
    slice_size = mesh.size // mesh.slices
    resized_target = target.resized(slice_size) if target.topology and mesh.slices not in (1, target.slices) else None
    if resized_target is None:
        return ""
    slice_text = count_text(slice_size, "device")
    return f" For {mesh.slices} slices of {slice_text}, use target={resized_target.name} target.slices={mesh.slices}."


def _torus_mesh_name(target: TargetConfig) -> str:
    """Return the name of a mesh with the shape of the target's torus, such as `4x4x1` for `v5e-16`.

    Without a topology, the first axis has all chips of a slice. Chips with several devices add an axis.
    """
    shape = list(parse_shape(target.topology) or (target.chips or 1,))
    if target.chip and target.chip.devices > 1:
        shape.append(target.chip.devices)
    return "x".join(str(n) for n in shape + [1] * (3 - len(shape)))
