"""The code's own facts: the hash sees every source file, git is asked only about kdlab's own checkout."""

import subprocess

import pytest

from kdlab import source
from kdlab.provenance import run_provenance
from kdlab.source import git_state, source_sha256


def git(folder, *arguments):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(("git", *identity, *arguments), cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path):
    git(tmp_path, "init", "-q")
    (tmp_path / "a.py").write_text("a = 1\n")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-q", "-m", "a")
    return tmp_path


def test_git_state_of_a_clean_and_a_changed_checkout(checkout):
    commit, dirty = git_state(checkout)
    assert len(commit) == 40
    assert dirty is False
    (checkout / "untracked.txt").write_text("a report of the run itself")
    assert git_state(checkout) == (commit, False)
    (checkout / "a.py").write_text("a = 2\n")
    assert git_state(checkout) == (commit, True)


def test_a_package_installed_inside_another_checkout_has_no_commit(checkout):
    site = checkout / ".venv" / "site-packages"
    site.mkdir(parents=True)
    assert git_state(site) == (None, None)


def test_an_environment_that_names_another_repository_is_not_followed(checkout, tmp_path_factory, monkeypatch):
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    expected = git_state(checkout)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(other))
    assert git_state(checkout) == expected


def test_a_checkout_without_a_commit_or_without_git(tmp_path, checkout, monkeypatch):
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    git(fresh, "init", "-q")
    assert git_state(fresh) == (None, None)
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert git_state(checkout) == (None, None)


def test_a_git_that_hangs_is_given_up(checkout, monkeypatch):
    def hang(*_, timeout, **__):
        raise subprocess.TimeoutExpired("git", timeout)

    monkeypatch.setattr(source.subprocess, "run", hang)
    assert git_state(checkout) == (None, None)


def test_source_hash_sees_the_cuda_sources(tmp_path):
    package, csrc = tmp_path / "package", tmp_path / "csrc"
    package.mkdir()
    csrc.mkdir()
    hashes = {source_sha256(package, csrc)}
    for name, text in (("op.cu", "a"), ("op.cu", "b"), ("op.cuh", "b"), ("op.txt", "c")):
        (csrc / name).write_text(text)
        hashes.add(source_sha256(package, csrc))
    assert len(hashes) == 4, "each but the text file counts"


def test_source_hash_sees_names_and_bytes_of_python_files_alone(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("x = 1\n")
    first = source_sha256(tmp_path)
    (tmp_path / "room" / "notes.txt").write_text("not code")
    assert source_sha256(tmp_path) == first
    (tmp_path / "room" / "a.py").write_text("x = 2\n")
    second = source_sha256(tmp_path)
    (tmp_path / "room" / "a.py").rename(tmp_path / "room" / "b.py")
    assert len({first, second, source_sha256(tmp_path)}) == 3
    assert source_sha256() == run_provenance()["source_sha256"]
