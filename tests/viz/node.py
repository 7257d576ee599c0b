"""Running a front-end module in Node.js, where one is found: on the path, or the one that playwright brings."""

import importlib.util
import json
import shutil
import subprocess
from base64 import b64encode
from pathlib import Path

import pytest


def find_node():
    """Return a Node.js binary or None."""
    found, playwright = shutil.which("node"), importlib.util.find_spec("playwright")
    if found is None and playwright is not None:
        brought = Path(playwright.origin).parent / "driver" / "node"
        found = str(brought) if brought.is_file() else None
    return found


def run_module(module, script, data):
    """Run `script` (an expression of `m`, the module, and `data`) and return its value."""
    node = find_node()
    if node is None:
        pytest.skip("no Node.js: neither `node` on the path nor playwright's own")
    source = "data:text/javascript;base64," + b64encode(Path(module).read_bytes()).decode()
    code = f"""
        const m = await import({json.dumps(source)});
        let text = ""; for await (const part of process.stdin) text += part;
        const data = JSON.parse(text);
        console.log(JSON.stringify({script}));"""
    words = [node, "--input-type=module", "-e", code]
    done = subprocess.run(words, input=json.dumps(data), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
