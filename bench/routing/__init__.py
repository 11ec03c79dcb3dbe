"""The parts of `bench.routers`: engines and load in processes of their own, the contenders, the figures."""
