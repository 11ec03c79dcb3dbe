"""The simulated engine: `evenhand engine`, and the protocols of the engines that it stands for."""
