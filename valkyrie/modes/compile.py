"""`mode=compile`: compiles the step for its target and predicts its time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from valkyrie.config.modes import COMPILE_FILE, HLO_TEXT_FILE, HOUR_S, MODULE_FILE, SHAPING_KEYS, CompilingMode, Needs

if TYPE_CHECKING:
    from valkyrie.config.run import Run

_MARGIN_S = 300.0
"""Seconds for a trial to start and to write its results, in addition to the compiler's time limit."""


@dataclass
class Config(CompilingMode):
    """Settings of `mode=compile`.

    Args:
        hlo: whether to write the optimised module to the run folder.
    """

    description: ClassVar[str] = (
        "compile the step for its target, without that hardware, to see if it fits in memory and how long it takes"
    )
    needs: ClassVar[Needs] = Needs.compiler
    results: ClassVar[str | None] = COMPILE_FILE
    files: ClassVar[Mapping[str, tuple[str, ...]]] = {"hlo": (MODULE_FILE, HLO_TEXT_FILE)}
    predicts: ClassVar[bool] = True

    name: str = "compile"
    hlo: bool = False

    def result_keys(self) -> Sequence[str]:
        """Return the config keys that affect the result of a trial."""
        return SHAPING_KEYS

    def limit_s(self) -> float:
        """Return the time limit of a trial in seconds.

        It is five minutes longer than the time limit of the compile, and at least an hour.
        """
        return max(HOUR_S, self.time_limit_s + _MARGIN_S)

    def run(self, run: Run) -> int:
        """Compile the step and predict its time and memory. Returns the exit status."""
        from valkyrie.search.modes import compile_mode

        return compile_mode(run)
