"""The machine a program runs on: its torus, links and networks, and the replay of a compiled program on it."""
