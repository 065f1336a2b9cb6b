"""Compares the memory estimate of `mode=show` with the memory that the TPU compiler needs, over partitions and remats.

    python experiments/memory.py                    # about 60 layouts for v5e-8, about 5 s each; needs libtpu
    python experiments/memory.py --ship             # also write the error interval shown with every run's estimate

The compiler is configured for a chip with 100 MiB. It then rejects a program early and reports its peak in bytes, in a
hundredth of the time of a full compile. (The peak of a full compile is within 2% of that number, experiments/LOG.md.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax

import valkyrie
from valkyrie.config.run import Run
from valkyrie.foreign_errors import parse_out_of_memory
from valkyrie.hardware.platforms import platform_of
from valkyrie.parallel.mesh import build_mesh
from valkyrie.paths import config_names, write_atomic
from valkyrie.train.memory import ERRORS, expected_memory
from valkyrie.train.program import StepProgram

HERE = Path(__file__).resolve().parent
LIMIT = "target.chip.xla_options.xla_tpu_max_hbm_size_mib=100"
MODELS = {
    "gpt_125m": ["batch=64"],
    "valkyrie_125m": ["batch=64", "seq=1024"],
    "gpt_1b": ["batch=32", "model.layers=8"],
}
TARGETS = ["target=v5e-8", "mesh=2x2x2"]
REMATS = ("none", "dots", "full", "minimal_with_context")


def main() -> None:
    """Compare every legal layout and print the errors of the estimate."""
    parser = argparse.ArgumentParser(description="The estimate of mode=show against the compiler.")
    parser.add_argument("--only", nargs="*", default=[], help="only layouts whose name holds one of these words")
    parser.add_argument("--json", type=Path, default=HERE / "memory.json", help="where results are kept")
    parser.add_argument("--kept", action="store_true", help="no compile: only layouts whose bytes are kept")
    parser.add_argument("--ship", action="store_true", help=f"write the interval to {ERRORS.name}")
    asked = parser.parse_args()
    kept = {r["layout"]: r for r in json.loads(asked.json.read_text())} if asked.json.is_file() else {}
    for model, overrides in MODELS.items():
        for partition in config_names("partition"):
            for remat in REMATS:
                name = f"{model} {partition} {remat}"
                if (asked.only and not any(word in name for word in asked.only)) or (asked.kept and name not in kept):
                    continue
                try:
                    run = valkyrie.compose(
                        f"model={model}", *overrides, *TARGETS, f"partition={partition}", f"remat={remat}", LIMIT
                    )
                except ValueError as error:
                    print(f"{name}: left out: {str(error).splitlines()[0][:100]}", flush=True)
                    continue
                result = compare(run, kept.get(name, {}).get("needed"))
                kept[name] = {"layout": name} | result
                print(name, result, flush=True)
                write_atomic(asked.json, json.dumps(list(kept.values()), indent=1) + "\n")
    told = summary(list(kept.values()))
    print(json.dumps(told, indent=1))
    if asked.ship:
        write_atomic(ERRORS, json.dumps(told, indent=1) + "\n")


def compare(run: Run, needed: int | None) -> dict[str, Any]:
    """Return the memory of a step in bytes, estimated and from the compiler. Skips the compile if `needed` is set."""
    began = time.perf_counter()
    devices = platform_of(run.config.target.platform).compile_devices(run.config.target, run.config.mesh.size)
    program = StepProgram(run, build_mesh(run.config.mesh, devices), backend="tpu")
    expected = expected_memory(run, program.abstract_state)
    if needed is None:
        try:
            program.compile_step()
        except jax.errors.JaxRuntimeError as error:
            needed = parse_out_of_memory(str(error))["needed"]
    assert needed is not None, "the compiler did not refuse"
    at_rest = expected.parameters + expected.average + expected.optimizer
    return {
        "needed": needed,
        "expected": expected.total,
        "at_rest": at_rest,
        "gradients": expected.gradients,
        "ratio": needed / expected.total,
        "temporary_ratio": (needed - at_rest) / (expected.total - at_rest),
        "seconds": round(time.perf_counter() - began, 1),
    }


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of layouts and models, and the low, high and median ratio of needed to estimated bytes.

    `within_15_percent` is the number of layouts with a ratio between 0.85 and 1.15.
    """
    ratios = sorted(r["ratio"] for r in results)
    models = len({r["layout"].split()[0] for r in results})
    return {
        "layouts": len(ratios),
        "models": models,
        "low": ratios[0],
        "high": ratios[-1],
        "median": statistics.median(ratios),
        "within_15_percent": sum(abs(ratio - 1) <= 0.15 for ratio in ratios),
    }


if __name__ == "__main__":
    main()
