"""Finds fast layouts before training: estimates, compiles or measures the step of each.

The function `mode.search` runs `mode=search` in these steps:

1. `request.parse_request` parses the slices, the settings that may vary, and the budget.
2. `estimate.space.enumerate_layouts` lists all legal layouts, and `estimate.rank` estimates their step time and memory.
3. `shortlist.shortlist` selects the fastest layouts that fit, or may fit given the errors of memory estimates.
4. `compiling.compile_best` compiles them until no other can be faster. Each compile is a trial. It runs in a child
   process (`compile.runner`, `compile.child`), and the schedule of the program is replayed (`compile.replayed`).
5. With `mode.tune`, `tuning.tune_best` tries compiler options and implementations on the best layout.
6. If this machine has the devices, `measuring` times the best few layouts on them.
7. `answer.rank_layouts` ranks the layouts. Compiled and measured step times correct the predictions of similar layouts
   (README.md). `answer_record` defines the answer that is stored in `search.json`.
"""

NOT_COMPILED = 3
"""Exit status if a layout does not fit or was not compiled. This is a result, not an error."""
