"""The use cases: how one request is served in each serving mode."""
