"""Trains a model: the train state, the compiled training step, and the training loop.

`prepare.prepare_run` returns the devices, the data and the tokenizer. `trainer.fit` builds the rest and trains:

1. `program.StepProgram`: the jitted functions (`init`, `step`, `evaluate`) with their shapes and shardings; no arrays.
   `room.check_memory_fit` refuses a run whose parameters, optimizer state and gradients do not fit.
2. `checkpoint.Checkpoints` and `_restore_or_init`: the newest checkpoint that all processes can use, or new parameters
   if there is neither a durable checkpoint nor a usable fast one. A fast one of another layout or model, or a damaged
   one, is skipped. ValueError if all durable checkpoints are damaged, or if the newest undamaged one does not fit.
3. `compiled.compile_step`: the executable of the step.
4. `_train_steps`: the loop. It dispatches a step and then reads the metrics of the one before, so that devices do
   not wait for Python except at evaluations, saves, samples and the start of a profile. Callbacks (`callbacks.py`)
   check, profile, evaluate, save, sample and log.

Around the loop, `watchdog` ends a run in which a step hangs (not a compile, evaluation, save or sample),
`valkyrie.processes.interrupt` stops the run after a step on a signal, and `valkyrie.runs.goodput` records where the
time goes.
"""
