"""Policies of `jax.checkpoint` for `remat`: which activations are saved, offloaded, or recomputed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from valkyrie.hardware.platforms import get_platform
from valkyrie.models.layers import Checkpoint
from valkyrie.ops.choices import ATTENTION_OUTPUT
from valkyrie.parallel.remat import ALL_ACTIVATIONS, PRODUCT_ACTIVATIONS, RematConfig

Policy = Callable[..., Any]

_GROUPED_PRODUCT = "custom_vmap_call"
"""JAX's primitive around products of groups of rows, which have their own `vmap` (`valkyrie.ops.grouped`)."""

_CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
"""JAX's primitive of cuDNN's kernel. Its backward pass also needs the softmax sums, which have no name to save."""


def make_block_checkpoint(remat: RematConfig, backend: str) -> Checkpoint:
    """Return a function that wraps a group of blocks in `jax.checkpoint` with the policy of `remat`.

    If the policy saves everything, the function returns the group unchanged.
    """
    if remat.saves_everything:
        return lambda block: block
    policy = _policy(remat, backend)
    return lambda block: jax.checkpoint(block, policy=policy, prevent_cse=False)


def _policy(remat: RematConfig, backend: str) -> Policy:
    """Return the `jax.checkpoint` policy of `remat`.

    On a CPU, it saves activations instead of offloading them, because device and host memory are the same.
    """
    policies = jax.checkpoint_policies
    named_policy, listed_names = _named_policy(remat, backend), {*remat.save, *remat.offload}
    if ALL_ACTIVATIONS in remat.save:
        default_policy = policies.everything_saveable
    elif PRODUCT_ACTIVATIONS in remat.save:
        default_policy = _save_products
    else:
        default_policy = named_policy

    def policy(primitive: Any, *arguments: Any, **parameters: Any) -> Any:
        if primitive.name == _CUDNN_FORWARD and ATTENTION_OUTPUT in remat.save:
            return True
        is_listed = primitive.name == "name" and parameters["name"] in listed_names
        return (named_policy if is_listed else default_policy)(primitive, *arguments, **parameters)

    return policy


def _save_products(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    saves_dot = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return primitive.name == _GROUPED_PRODUCT or saves_dot(primitive, *arguments, **parameters)


def _named_policy(remat: RematConfig, backend: str) -> Policy:
    if not remat.offload or get_platform(backend).runs_on_host:
        return jax.checkpoint_policies.save_only_these_names(*remat.save, *remat.offload)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=remat.save,
        names_which_can_be_offloaded=remat.offload,
        offload_src="device",
        offload_dst="pinned_host",
    )
