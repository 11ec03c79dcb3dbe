"""HTTP towards engines, and nothing else: knows no Redis and no Starlette."""
