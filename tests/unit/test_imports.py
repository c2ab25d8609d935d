"""The base install is the client and the protocol: importing them loads nothing heavier."""

import json
import subprocess
import sys

import pytest

# h11 is not in the list: wsproto, below trio-websocket, stands on it.
HEAVY = {"torch", "transformers", "tokenizers", "numpy", "prometheus_client", "safetensors", "gguf", "jinja2", "rich"}


@pytest.mark.parametrize("module", ["wsbatch", "wsbatch.client", "wsbatch.wire", "wsbatch.messages", "wsbatch.errors"])
def test_the_client_is_light(module: str) -> None:
    program = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, check=True, text=True).stdout
    loaded = set(json.loads(output))
    assert module in loaded
    assert loaded & HEAVY == set()
    assert not [name for name in loaded if name.startswith(("wsbatch.engine", "wsbatch.server", "wsbatch.testing"))]
