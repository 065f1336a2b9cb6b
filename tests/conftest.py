"""Decides in which world tests run: eight CPU devices, types checked, warnings fatal, nobody's home touched.

Everything here happens before JAX starts a backend and before `valkyrie` is imported.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEVICES = 8

_scratch = tempfile.TemporaryDirectory(prefix="valkyrie-tests-", ignore_cleanup_errors=True)


def _set_environment() -> None:
    """Set what child processes inherit too; what the caller has said about platform and cache is kept."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    os.environ["VALKYRIE_CACHE"] = str(Path(_scratch.name) / "cache")
    for variable in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        os.environ[variable] = str(Path(_scratch.name) / variable.lower())
    os.environ["WANDB_MODE"] = "offline"
    for variable in ("WANDB_API_KEY", "TPU_MESH_CONFIG", "TPU_AXIS_NAMES", "HYDRA_FULL_ERROR"):
        os.environ.pop(variable, None)


_set_environment()

import jax  # noqa: E402 - reads the environment set above
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_num_cpu_devices", DEVICES)
install_import_hook("valkyrie", "beartype.beartype")
