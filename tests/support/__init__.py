"""What the tests stand on: simulated engines, a private Redis, real deployments, load, the quiet check."""
