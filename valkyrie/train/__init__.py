"""Trains a model: the train state, the compiled training step, and the training loop.

`trainer.fit` builds what a run needs and runs it:

1. `program.StepProgram`: the sharded model and optimizer on the mesh; `room.check_room`: whether they fit.
2. `checkpoint.Checkpoints` and `prepare`: the newest checkpoint that can be read, or new parameters.
3. `compiled.compile_step`: the executable of the step.
4. `_train_steps`: the loop. It dispatches a step and then reads the metrics of the one before, so that the devices
   never wait for Python. Callbacks (`callbacks.py`) check, profile, evaluate, save, sample and log.

Around the loop, `watchdog` ends a run that hangs, `processes.interrupt` stops it on a signal, and `runs.goodput`
records where the time goes.
"""
