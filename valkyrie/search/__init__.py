"""Finds fast layouts before training: estimates, compiles or measures the step of each.

How `mode=search` gets its answer, in `mode.search`:

1. `request.parse_request`: the slices, the settings that may vary, and the budget.
2. `estimate.space.enumerate_layouts` and `estimate.rank`: every layout as arrays, with its step time and memory.
3. `shortlist.shortlist`: the fastest that fit or may fit.
4. `compiling.compile_best`: compiles them until no other can be faster. Each is a trial, which the compiler runs in a
   child process (`compile.runner`, `compile.child`), and whose schedule is replayed (`compile.replayed`).
5. `tuning.tune_best`: compiler options for the best, with `mode.tune`.
6. `measuring`: runs the best few on devices at hand.
7. `answer.rank_layouts`: the rows, with what is corrected by what (README.md); `answer_record`: `search.json`.
"""

NOT_COMPILED = 3
"""Exit status if a layout does not fit or was not compiled. This is a result, not an error."""
