"""Finds fast layouts before training: estimates, compiles or measures the step of each.

`valkyrie.search(...)` calls the function `valkyrie.api_search.search`. `mode.search_mode` runs `mode=search` in these
steps:

1. `request.parse_request` parses the slices, the settings that may vary, and the budget.
   `local_devices.add_measured_figures` times CPU devices with unknown speed.
2. `estimate.space.enumerate_layouts` lists the legal layouts to search, one mesh per way to shard. `estimate.rank`
   estimates their step time and memory.
3. `shortlist.build_shortlist` selects the fastest layouts that fit, or may fit given the errors of memory estimates.
4. `compiling.compile_best` compiles those with the best chance to be the fastest, until no other is likely to be
   faster or the budget runs out. `correcting` corrects estimates by compiled layouts, and `progress` prints the
   results. Each compile is a trial in this process (`modes.compile_into_folder`); the compiler runs in a child
   process (`compile.runner`, `compile.child`). `compile.replayed` replays the schedule of the compiled program
   (`valkyrie.machine.replay`) and multiplies its times by a factor for the chip (published runs, or `mode=calibrate`)
   and one for the number of slices (published runs), which `compile.correction` computes.
5. With `mode.tune`, `tuning.tune_best` tries compiler options and implementations on the best layout.
6. `measuring` times the best few layouts if there is one target and this machine has its devices. This step is skipped
   after Ctrl-C, if an environment variable makes every compile fail, or if the search may compile (`mode.compiles` is
   not 0), layouts were compiled, and none of them has a step time.
7. `answer.rank_layouts` ranks the layouts and corrects estimates by compiled times. `measuring.rank_measured_layouts`
   corrects estimated and compiled times by measured ones. A table in README.md lists the corrections. `baselines`
   compares the best layout with two others. `answer_record` defines the answer, which `folder` stores in `search.json`.

Programs that are not a run's step are predicted by `compile.predict`: `compile.lowered` sends them to a child process
(`compile.program_child`) and to the cache, `compile.faults` finds faults of the sharding, and `compile.shortage`
explains why a program does not fit. `programs` predicts several layouts of a program or searches its meshes, and
`comparison` ranks the layouts.

`explain/` implements `mode=explain`, which compares two layouts. `calibrate/` implements `mode=calibrate`, which fits
the constants of the estimate and the factor of a chip to the user's own trials.

Some names are similar. `mode.py` implements `mode=search`, and `modes.py` implements `mode=compile` and `mode=measure`.
The packages `compile/`, `measure/` and `tune/` compile, measure or tune one layout. The modules `compiling.py`,
`measuring.py` and `tuning.py` are stages of a search.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _CallablePackage(ModuleType):
    """This package, which is also the function `search` of the Python API.

    Importing any module of the package sets the attribute `search` of `valkyrie` to the package.
    """

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self.__wrapped__(*arguments, **keywords)

    @property
    def __wrapped__(self) -> Any:
        """The function, whose signature and help Python shows."""
        return import_module("valkyrie.api_search").search


sys.modules[__name__].__class__ = _CallablePackage

NO_STEP_TIME = 3
"""Exit status of a search without a step time.

That is, no layout fits, or layouts were compiled and none of them has a step time, or all measurements failed.
Also that of `mode=compile` if the program does not fit or the compile fails or exceeds its time limit, and of
`mode=measure` if the program does not fit. A search with nothing but estimates ends with 0. Differs from 1 and 2,
because it reports a result and not an error.
"""

FIRST_RESULT_FACTOR = 2.0
"""Until a layout has a step time, a search may take up to this multiple of its budget.

A stopped compile has no result. If the first were stopped at the end of the budget, repeating the search would never
compile anything.
"""
