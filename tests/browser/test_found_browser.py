"""Without a browser the tests are skipped with a reason, and continuous integration goes on."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.browser.jupyter_lab import find_chromium

INSTALL = Path(__file__).resolve().parents[2] / ".ci" / "install-browser"


def test_no_browser_is_a_skip_that_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="no browser: none of chromium"):
        find_chromium()
    browser = tmp_path / "chromium-browser"
    browser.write_text("#!/bin/sh\n")
    browser.chmod(0o755)
    assert find_chromium() == str(browser)


def install(folder):
    words = [shutil.which("sh"), str(INSTALL)]
    done = subprocess.run(words, capture_output=True, text=True, env={"PATH": str(folder)})
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def program(folder, name, text):
    path = folder / name
    path.write_text(f"#!{shutil.which('sh')}\n{text}\n")
    path.chmod(0o755)


def test_the_browser_is_installed_where_it_can_be_and_nothing_fails_where_it_cannot(tmp_path):
    assert install(tmp_path).startswith("no Chromium, and no apt-get as root")
    program(tmp_path, "id", "echo 0")
    program(tmp_path, "apt-get", "exit 1")
    assert install(tmp_path) == "Chromium could not be installed: browser tests will be skipped"
    program(tmp_path, "apt-get", f'echo "$@" >> {tmp_path}/asked')
    assert install(tmp_path) == "installed Chromium for the browser tests"
    assert (tmp_path / "asked").read_text().splitlines() == [
        "update -qq", "install -y -qq --no-install-recommends chromium",
    ]  # fmt: skip
    program(tmp_path, "chromium", "exit 0")
    assert install(tmp_path) == "browser tests run in chromium"
