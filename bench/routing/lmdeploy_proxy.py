"""`lmdeploy serve proxy`, without what its engine needs. Run by the interpreter of its own environment.

    python lmdeploy_proxy.py PORT

Importing `lmdeploy` loads torch and transformers, of gigabytes, of which the proxy uses nothing. Here the packages
above the proxy are bare, and those two are stand-ins that only let annotations pass; the proxy itself, and all that
runs in it, is what was released. Its flags are the command's defaults, but for the file that it keeps its nodes in.
"""

import importlib.util
import sys
import types
from pathlib import Path


class StandIn(types.ModuleType):
    """Any name is a class, so that it can be an annotation or a base."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def prepare() -> None:
    found = importlib.util.find_spec("lmdeploy")
    assert found is not None and found.origin is not None
    home = Path(found.origin).parent
    for name in ("lmdeploy", "lmdeploy.serve", "lmdeploy.serve.core"):
        bare = types.ModuleType(name)
        bare.__path__ = [str(home.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = bare
    for name in ("torch", "transformers"):
        sys.modules[name] = StandIn(name)


if __name__ == "__main__":
    prepare()
    from lmdeploy.serve.proxy.proxy import proxy  # type: ignore[import-not-found]

    proxy(server_name="127.0.0.1", server_port=int(sys.argv[1]), log_level="WARNING", disable_cache_status=True)
