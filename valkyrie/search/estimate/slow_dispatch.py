"""The cost of sending tokens to parameters such as experts over the slow network between slices or hosts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from valkyrie.config.run import Run
from valkyrie.hardware.platforms import get_platform
from valkyrie.models import LayeredModel
from valkyrie.search.estimate.dispatch import pass_counts
from valkyrie.search.estimate.efficiency import chip_efficiency
from valkyrie.search.estimate.network import collective_model
from valkyrie.search.estimate.runs import stack_runs
from valkyrie.search.estimate.times import StepEstimator
from valkyrie.search.estimate.work import step_work
from valkyrie.units import decimal_bytes_text, duration_text


def describe_slow_dispatch(run: Run) -> str | None:
    """Return a warning with the cost of sending tokens between slices or hosts, or None if the run does not do so.

    Runs send tokens along the mesh axes that split dispatched axes (`Block.dispatches`). Returns None for unknown
    chips, and for models that are not a `LayeredModel`.
    """
    target, layout = run.config.target, run.layout
    chip, dispatched_axes = target.chip, sorted(layout.dispatched_axes)
    if chip is None or not dispatched_axes or not isinstance(run.model, LayeredModel):
        return None
    layouts, efficiency = stack_runs([run]), chip_efficiency(chip)
    mesh_axes = dict.fromkeys(m for axis in dispatched_axes for m in layouts.stored_axes(axis))
    links = {m: layouts.links[m] for m in mesh_axes if layouts.links[m].outer_size.item() > 1}
    if not links:
        return None
    network, work = collective_model(chip, efficiency), step_work(run)
    rate = min(axis.outer_rate.item() for axis in links.values()) * network.outer_efficiency
    step_s = StepEstimator(work, layouts, chip, efficiency, network).estimate(run.config.remat).step_s.item()
    # On a network whose only cost is a second per byte between slices or hosts, the seconds are these bytes.
    fast, ones = np.array([np.inf]), np.ones(1)
    free_links = {
        m: replace(axis, inner_rate=fast, ring_rate=fast, exchange_rate=fast, outer_rate=ones)
        for m, axis in layouts.links.items()
    }
    free_network = replace(network, outer_efficiency=1.0, start_s=0.0, hop_s=0.0, outer_start_s=0.0, scatter_ratio=1.0)
    estimator = StepEstimator(work, replace(layouts, links=free_links), chip, efficiency, free_network)
    sent_bytes = _dispatch_seconds_per_step(estimator)
    is_torus, spans = get_platform(chip.platform).has_torus, int(np.prod([axis.outer_size for axis in links.values()]))
    place = "slice" if is_torus else "host" if target.domain_hosts == 1 else "NVLink domain"
    arrays = ", ".join(dispatched_axes)
    return (
        f"{layout.format_axes([*links])} splits {arrays} over {spans} {place}s, so each device sends "
        f"{decimal_bytes_text(sent_bytes)} of tokens per step over the slow network between them. By estimate, this "
        f"takes {duration_text(sent_bytes / rate)} at {rate / 1e9:.3g} GB/s per device, before overlap; the step takes "
        f"{duration_text(step_s)}. To avoid this, split {arrays} over devices of one {place}."
    )


def _dispatch_seconds_per_step(estimator: StepEstimator) -> float:
    """Return the seconds to send tokens along dispatched axes and back in a step of a single layout."""
    seconds, remat = np.zeros(1), estimator.work.run.config.remat
    for mixing in estimator.work.mixing:
        for passes, dispatch_s in zip(pass_counts(mixing, remat), estimator.dispatch_seconds(mixing), strict=True):
            seconds += mixing.count * passes * dispatch_s
    return (seconds * estimator.layer_share * estimator.layouts.microbatches).item()
