"""Parses compiled programs: instructions of an optimised HLO module, their FLOPs and bytes, loops and collectives."""
