"""Compares the memory estimate of `mode=show` with the memory that the TPU compiler needs, over partitions and remats.

    python experiments/memory.py                    # about 130 layouts for v5e-8, about 5 s each; needs libtpu
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
from valkyrie.hardware.platforms import get_platform
from valkyrie.parallel.mesh import build_mesh
from valkyrie.paths import config_names, write_atomic
from valkyrie.train.memory_errors import ERRORS_FILES
from valkyrie.train.program import StepProgram
from valkyrie.train.run_memory import expected_memory

HERE = Path(__file__).resolve().parent
LIMIT_OVERRIDE = "target.chip.xla_options.xla_tpu_max_hbm_size_mib=100"
MODELS = {
    "gpt_125m": ["batch=64"],
    "valkyrie_125m": ["batch=64", "seq=1024"],
    "gpt_1b": ["batch=32", "model.layers=8"],
}
TARGETS = ["target=v5e-8", "mesh=2x2x2"]
REMATS = ("none", "dots", "full", "minimal_with_context")


def main() -> None:
    """Compare every legal layout and print the errors of the estimate."""
    parser = argparse.ArgumentParser(description="Compare the memory estimate of mode=show with the compiler.")
    parser.add_argument("--only", nargs="*", default=[], help="only layouts with one of these words in their name")
    parser.add_argument("--json", type=Path, default=HERE / "memory.json", help="file for the results")
    parser.add_argument("--kept", action="store_true", help="compile nothing: only layouts with stored results")
    parser.add_argument("--ship", action="store_true", help="also write the errors that mode=show prints")
    args = parser.parse_args()
    stored = {r["layout"]: r for r in json.loads(args.json.read_text())} if args.json.is_file() else {}
    for model, overrides in MODELS.items():
        for partition in config_names("partition"):
            for remat in REMATS:
                name = f"{model} {partition} {remat}"
                if (args.only and not any(word in name for word in args.only)) or (args.kept and name not in stored):
                    continue
                try:
                    run = valkyrie.compose(
                        f"model={model}",
                        *overrides,
                        *TARGETS,
                        f"partition={partition}",
                        f"remat={remat}",
                        LIMIT_OVERRIDE,
                    )
                except ValueError as error:
                    print(f"{name}: left out: {str(error).splitlines()[0][:100]}", flush=True)
                    continue
                result = compare(run, stored.get(name, {}).get("needed"))
                stored[name] = {"layout": name} | result
                print(name, result, flush=True)
                write_atomic(args.json, json.dumps(list(stored.values()), indent=1) + "\n")
    for has_pipeline, file in enumerate(ERRORS_FILES):
        errors = summarise_errors([r for r in stored.values() if (" pp" in r["layout"]) == bool(has_pipeline)])
        print(json.dumps(errors, indent=1))
        if args.ship:
            write_atomic(file, json.dumps(errors, indent=1) + "\n")


def compare(run: Run, needed: int | None) -> dict[str, Any]:
    """Compare the estimated memory of a step with the compiler's. Compiles only if `needed` is None.

    In the result, `needed` (from the compiler), `expected` (the estimate), `at_rest` (parameters, their average and the
    optimizer state) and `gradients` are bytes. `ratio` is `needed` over `expected`, and `temporary_ratio` is the same
    without `at_rest`. `seconds` is the duration of the comparison.
    """
    start = time.perf_counter()
    devices = get_platform(run.config.target.platform).devices_to_compile_for(run.config.target, run.config.mesh.size)
    program = StepProgram(run, build_mesh(run.config.mesh, devices), backend="tpu")
    expected = expected_memory(run, program.abstract_state)
    if needed is None:
        needed = measure_peak(program)
    assert needed is not None, "the compiler did not refuse"
    at_rest = expected.parameters + expected.ema + expected.optimizer
    return {
        "needed": needed,
        "expected": expected.total,
        "at_rest": at_rest,
        "gradients": expected.gradients,
        "ratio": needed / expected.total,
        "temporary_ratio": (needed - at_rest) / (expected.total - at_rest),
        "seconds": round(time.perf_counter() - start, 1),
    }


def measure_peak(program: StepProgram) -> int | None:
    """Return the bytes that a step needs, from the compiler's refusal, or None if it compiles the step."""
    try:
        program.compile_step()
    except jax.errors.JaxRuntimeError as error:
        return parse_out_of_memory(str(error)).needed
    return None


def summarise_errors(results: list[dict[str, Any]]) -> dict[str, Any]:
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
