"""Compiles MaxText's training step for a TPU slice, using MaxText's code, and predicts its step time.

    python experiments/foreign/maxtext_step.py model_name=llama3.1-8b compile_topology=v6e-32 per_device_batch_size=3

No TPU is needed. The script runs in a separate environment with MaxText 0.2.5 (see experiments/README.md). The
arguments are those of `python -m maxtext.trainers.pre_train.train_compile`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # otherwise libtpu queries a metadata server for minutes
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # otherwise a second compiling process is killed
    "JAX_PLATFORMS": "cpu",
}
"""Environment variables to set before libtpu and JAX are loaded on a machine without a TPU."""

OFFLINE_SETTINGS = (
    "dataset_type=synthetic",
    "enable_checkpointing=False",
    "base_output_directory=/tmp/maxtext",
    "run_name=step",
)
"""Settings with which MaxText requires no dataset, bucket or run name. They do not change the program."""


def main(arguments: Sequence[str]) -> None:
    """Compile the step for these arguments and print its prediction."""
    import valkyrie

    settings = dict(argument.partition("=")[::2] for argument in arguments)
    compiled, mesh = compile_step(arguments)
    slices = int(settings.get("compile_topology_num_slices", 1))
    print(valkyrie.predict(compiled, slice=valkyrie.slice(settings["compile_topology"], slices=slices), mesh=mesh))


def compile_step(arguments: Sequence[str]) -> tuple[Any, Any]:
    """Return MaxText's compiled training step (`jax.stages.Compiled`) for these settings, and its `jax.sharding.Mesh`.

    Follows MaxText's `train_compile.main` line by line. Raises XLA's error for a program that does not fit, as MaxText
    does.
    """
    os.environ.update(ENVIRONMENT)
    os.environ["LIBTPU_INIT_ARGS"] = (
        os.environ.get("LIBTPU_INIT_ARGS", "") + " --xla_tpu_spmd_rng_bit_generator_unsafe=true"
    )
    import jax
    from flax.core.spmd import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    base = os.path.join(os.path.dirname(pyconfig.__file__), "base.yml")
    slice_setting = (
        []
        if any(a.startswith("compile_topology_num_slices=") for a in arguments)
        else ["compile_topology_num_slices=1"]
    )
    config = pyconfig.initialize(["train_compile", base, *OFFLINE_SETTINGS, *slice_setting, *arguments])
    train_compile.validate_config(config)
    mesh = train_compile.get_topology_mesh(config)
    shaped_args, shaped_kwargs, state_shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
    parameter_shardings, state_shardings = sharding.maybe_update_params_sharding_with_opt(config, state_shardings)
    input_shardings = sharding.build_zero1_input_state_mesh_shardings(config, state_shardings, parameter_shardings)
    data_sharding = sharding.get_input_data_sharding(config, mesh)
    step, *jit_arguments = maxtext_utils.get_functional_train_with_signature(
        train.train_step, data_sharding, input_shardings, model, config, parameter_shardings
    )
    rules = logical_axis_rules(config.logical_axis_rules)
    return train_compile.jit_and_compile(step, shaped_args, shaped_kwargs, mesh, *jit_arguments, config, rules), mesh


if __name__ == "__main__":
    main(sys.argv[1:])
