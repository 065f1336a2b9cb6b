"""Trains a model: the train state, the compiled training step, and the training loop.

`prepare.prepare_run` returns the devices, the data and the tokenizer. `trainer.fit` builds the rest and trains:

1. `program.StepProgram`: the jitted functions (`init`, `step`, `evaluate`) with their shapes and shardings; no arrays.
   `room.check_memory_fit` refuses a run whose parameters, optimizer state and gradients do not fit.
2. `checkpoint.Checkpoints` and `_restore_or_init`: the newest checkpoint that all processes can use, or new parameters
   if there are none. Fast ones of another layout or model are not used. Damaged fast ones, and all fast ones of steps
   after the restored one, are deleted. ValueError if no fast one is usable and all durable ones are damaged, or if the
   newest undamaged durable one does not fit and no newer fast one is usable.
3. `compiled.compile_step`: the executable of the step.
4. `_train_steps`: the loop. It dispatches a step and then reads the metrics of the one before, so that devices do
   not wait for Python except for callbacks that are due: evaluations, code evaluations, saves, samples, and the start
   and end of a profile. Callbacks (`callbacks.py`) check, profile, evaluate, save, sample and log.

Around the loop, `watchdog` ends a run in which a step hangs (not a compile or `Callback.on_step`),
`valkyrie.processes.interrupt` stops the run after a step on a signal, and `valkyrie.runs.goodput` records where the
time goes.
"""
