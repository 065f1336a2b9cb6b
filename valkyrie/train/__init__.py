"""From a run to a trained model: the train state, the one step program, and the loop."""
