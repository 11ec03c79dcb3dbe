"""The parts of `bench/chaos.py`: engines as processes, load, faults, and the watch over the counts."""
