"""The HTTP face: the raw proxy endpoint, and Starlette routes for everything that isn't hot."""
