"""Figures of chips that only one platform has: instruction counts of TPU kernels, and the parts of an NVIDIA GPU."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

from valkyrie.problems import Problem, ProblemCode, check_range, format_alternatives


@dataclass
class SplashBundles:
    """Numbers of VLIW bundles (instructions) of a splash attention kernel on one core, bfloat16, causal.

    Each list has the numbers for a block of 512x512 at head size 128, of 1024x1024 at 128, and of 512x512 at 256.
    libtpu compiled the kernels alone, with a batch and residuals. The numbers were read from its dumps
    (`LIBTPU_INIT_ARGS=--xla_jf_dump_to=DIR --xla_jf_dump_llo_text=true`). In `*-final_bundles.txt`, the loop over the
    grid begins at `LB:`. Its last three forward branches (`sbr.rel`) skip the start of a row, the block, and the end of
    a row; the bundles that a branch skips belong to that region, and all others to a step. A bundle takes at least one
    cycle. Longer grids, grouped heads and kernels without a batch change a step by up to 80 bundles. Segment ids and
    local masks add up to 8% to a block.

    Args:
        step: Any step of the grid, even at a block that the mask skips: fetching, index arithmetic, and clearing dq in
            the fused backward pass.
        block: A block that the mask does not skip.
        ends: Start and end of a row of blocks (dkv: a column): clearing the sums, then normalising and writing.
    """

    step: list[int] = field(default_factory=list)
    block: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)


@dataclass
class GpuFigures:
    """Hardware figures of an NVIDIA GPU, as in XLA's `GpuTargetConfigProto`.

    Args:
        capability: CUDA compute capability, such as `8.0`. The suffix `a` (`9.0a`) adds instructions that only this
            generation has.
        sms: Streaming multiprocessors.
        fp32_units: FP32 units of a multiprocessor.
        clock_ghz: Maximum clock.
        l2_bytes: Size of the L2 cache.
        shared_bytes: Shared memory of a multiprocessor.
        nvlinks: NVLinks of a GPU; 0 for PCIe only.
        domain_hosts: Largest number of hosts whose GPUs NVLink joins into one domain (NVL72: 18).
        best_tflops: Achieved TFLOP/s of the fastest matrix product in bfloat16.
        products: Achieved TFLOP/s of products by dtype, for m, n and k in 256, 1024 and 4096, with k varying fastest.
            Without any, those of the H100 are scaled by `best_tflops`.
        attention: Achieved TFLOP/s of attention's forward kernel at head size 128, by the number of keys.
        collectives: Bytes of the whole array by time, in GB/s, for the GPUs of an NVLink domain: by kind, by the number
            of GPUs, and for 64 KiB, 1, 4, 16, 64 and 256 MiB, and 1 GiB. Without any, those of the H100 are used, with
            the time beyond that of 64 KiB scaled by `switch_gbs`.
    """

    capability: str = ""
    sms: int = 0
    fp32_units: int = 128
    clock_ghz: float = 0.0
    l2_bytes: int = 0
    shared_bytes: int = 0
    nvlinks: int = 0
    domain_hosts: int = 1
    best_tflops: float = 0.0
    products: dict[str, list[float]] = field(default_factory=dict)
    attention: dict[int, float] = field(default_factory=dict)
    collectives: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    @property
    def capability_numbers(self) -> tuple[int, int]:
        """Major and minor number of `capability`."""
        major, minor = self.capability.removesuffix("a").split(".")
        return int(major), int(minor)

    def hosts_per_domain(self, hosts: int) -> int:
        """Return the hosts of each NVLink domain of a slice. Domains are equal, so that this divides `hosts`."""
        return max(n for n in range(1, self.domain_hosts + 1) if hosts % n == 0)

    def domain_problems(self, target: str, chips: int, hosts: int) -> list[Problem]:
        """Return a problem if equal domains are so small that a slice has over twice as many of them as it needs."""
        if self._has_large_domains(hosts):
            return []
        per_host, domain_hosts, key = chips // hosts, self.hosts_per_domain(hosts), "target.chip.gpu.domain_hosts"
        nearest = [
            next(filter(self._has_large_domains, counts)) for counts in (range(hosts, 0, -1), itertools.count(hosts))
        ]
        names = [f"target={target.rpartition('-')[0]}-{n * per_host}" for n in nearest]
        sizes = [f"domains of {self.hosts_per_domain(n) * per_host}" for n in nearest]
        alternatives = [f"{name} ({size})" for name, size in zip(names, sizes, strict=True)]
        text = (
            f"target={target}: NVLink joins up to {self.domain_hosts} hosts of {per_host} GPUs into a domain. Domains "
            f"are equal, so {hosts} hosts make {hosts // domain_hosts} domains of only {domain_hosts * per_host} GPUs. "
            f"Use {format_alternatives(None, alternatives)}. If your domains are so small, set {key}={domain_hosts}."
        )
        return [Problem(ProblemCode.conflict, "target.chips", chips, text)]

    def _has_large_domains(self, hosts: int) -> bool:
        """Return whether hosts make at most twice as many equal domains as full ones would be enough for."""
        return hosts // self.hosts_per_domain(hosts) <= 2 * -(-hosts // self.domain_hosts)

    def problems(self) -> list[Problem]:
        """Return a problem for each figure that is malformed or out of range. A figure may be missing (0 or empty)."""
        key, problems = "target.chip.gpu", []
        if self.capability and not re.fullmatch(r"[1-9][0-9]*\.[0-9]a?", self.capability):
            text = (
                f"{key}.capability={self.capability} is no CUDA compute capability. Write two numbers with a dot, such "
                "as 8.0 for an A100, or 9.0a for an H100."
            )
            problems.append(Problem(ProblemCode.malformed, f"{key}.capability", self.capability, text))
        for name in ("sms", "fp32_units", "clock_ghz", "l2_bytes", "shared_bytes", "nvlinks", "best_tflops"):
            problems += check_range(f"{key}.{name}", getattr(self, name), least=0)
        return problems + check_range(f"{key}.domain_hosts", self.domain_hosts, least=1)
