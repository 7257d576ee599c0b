"""JupyterLab on loopback with a token and a found Chromium, for tests that need a real page."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import matplotlib
import nbformat
import pytest

from kdlab.report import read_notebook

# JupyterLab says "idle" before its session is connected; running then would open a dialog.
CONNECTED = """() => {
    const session = window.jupyterapp?.shell?.currentWidget?.sessionContext;
    const kernel = session?.session?.kernel;
    return session?.isReady && kernel?.connectionStatus === 'connected' && kernel.status === 'idle';
}"""
ROOT = Path(__file__).resolve().parents[2]
MILLISECONDS = 90_000
QUIET = '{"fetchNews": "false", "checkForUpdates": false}'


def find_chromium():
    """Return a Chromium or Chrome of this machine; skip the test with a reason where there is none."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the path")
    return found


def cut_notebook(notebook, cell_ids, folder, parameters):
    """Write some cells of a notebook, the first with other parameters, and a last one that prints "cells done"."""
    whole = read_notebook(notebook)
    cells = [cell for cell in whole.cells if cell.id in cell_ids]
    assert len(cells) == len(cell_ids)
    given = parameters | {"figures": str(folder), "results": str(folder)}
    cells[0].source += "".join(f"\n{name} = {value!r}" for name, value in given.items())
    cells.append(nbformat.v4.new_code_cell('print("cells", "done")', id="done"))
    path = folder / "notebook" / notebook.name
    path.parent.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=whole.metadata), path)
    return path


@contextlib.contextmanager
def open_notebook(notebook, folder):
    """Open a notebook in JupyterLab in a browser; gives the page, and the list that its errors are put into."""
    pytest.importorskip("jupyterlab", reason="JupyterLab is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium, errors = find_chromium(), []
    with (
        jupyter_lab(notebook.parent, folder, {"PYTHONPATH": str(ROOT)}) as (address, token),
        playwright.sync_playwright() as tools,
    ):
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_context(viewport={"width": 1400, "height": 1200}).new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.goto(f"{address}/lab/tree/{notebook.name}?token={token}&reset", wait_until="domcontentloaded")
        page.wait_for_selector("#jupyterlab-splash", state="detached", timeout=MILLISECONDS)
        page.locator(".jp-NotebookPanel:visible .jp-Cell").first.wait_for(timeout=MILLISECONDS)
        page.wait_for_function(CONNECTED, timeout=MILLISECONDS)
        yield page, errors
        browser.close()


@contextlib.contextmanager
def jupyter_lab(root, folder, variables):
    """Serve `root` with everything that JupyterLab writes below `folder`; gives its address and token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token, log = secrets.token_hex(16), folder / "lab.log"
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(QUIET)
    words = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}", "--allow-root",
        "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}",
        "--LabApp.expose_app_in_browser=True", f"--LabApp.user_settings_dir={folder / 'settings'}",
        f"--LabApp.workspaces_dir={folder / 'workspaces'}", "--LabApp.extension_manager=readonly",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "HOME")
    own = {name: str(folder / name.lower()) for name in names}
    # matplotlib's list of fonts takes seconds to make and is the same for everybody.
    environment = os.environ | own | {"MPLCONFIGDIR": matplotlib.get_cachedir()} | variables
    for name in names:
        (folder / name.lower()).mkdir()
    address, header = f"http://127.0.0.1:{port}", {"Authorization": f"token {token}"}
    with log.open("w") as written:
        server = subprocess.Popen(
            words, stdout=written, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        _wait(server, address, header, log)
        yield address, token
    finally:
        stop = urllib.request.Request(address + "/api/shutdown", method="POST", headers=header)
        with contextlib.suppress(OSError):
            urllib.request.urlopen(stop, timeout=10)
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _wait(server, address, header, log):
    request = urllib.request.Request(address + "/api/status", headers=header)
    until = time.monotonic() + 90
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()[-2000:]
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=2)
            return
        time.sleep(0.25)
    raise AssertionError("JupyterLab did not answer in 90 seconds:\n" + log.read_text()[-2000:])
