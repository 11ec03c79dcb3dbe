"""Everything that talks to Redis."""
