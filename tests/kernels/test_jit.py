"""When a kernel is compiled, and what asking for one costs; no GPU needed."""

import dataclasses
import json
import os
import threading
import time

import pytest
import torch

from kdlab.errors import ArgumentError, BuildError
from kdlab.kernels import jit
from kdlab.kernels.jit import Build, kernel
from kdlab.kernels.jit import build as jit_build
from kdlab.kernels.jit import cache as jit_cache
from kdlab.kernels.jit.build import compile_build
from kdlab.kernels.jit.cache import parse_resources
from kdlab.kernels.jit.source import read_source
from kdlab.kernels.jit.toolchain import find_toolchain
from tests.kernels.jit_sources import write_sources

ARCH, PLAIN = "sm_90a", Build("plain.cu")
CUDA = torch.device("cuda", 0)


def entries(csrc):
    return sorted(path.name for path in (csrc / "cache" / "kernels").iterdir())


def test_it_compiles_once(csrc, compiled):
    first, source = compile_build(PLAIN, ARCH)
    again, _ = compile_build(PLAIN, ARCH)
    assert compiled == ["plain.cu for sm_90a"]
    assert first == again
    assert list(first.kernels) == ["scale"]
    assert first.kernels["scale"].registers > 0
    assert b".debug_line" in first.content, "profilers want line numbers"
    assert [file.name for file in source.files] == ["plain.cu", "factor.cuh", "common.cuh"]
    facts = json.loads(next((csrc / "cache" / "kernels").glob("*.json")).read_text())
    assert facts["build"] == "plain.cu for sm_90a"
    assert facts["kernels"]["scale"]["spill_bytes"] == 0


def test_source_includes_constants_and_architecture_are_told_apart(csrc, compiled):
    deep = csrc / "deep.cuh"
    deep.write_text("#define FACTOR 2\n")
    builds = [PLAIN, Build("plain.cu", (("A", 1),)), Build("plain.cu", (("A", 2),)), Build("plain.cu", (("B", 1),))]
    for build in builds:
        compile_build(build, ARCH)
    compile_build(PLAIN, "sm_80")
    assert len(compiled) == 5
    two, _ = compile_build(PLAIN, ARCH)
    for path, text in (
        (csrc / "plain.cu", (csrc / "plain.cu").read_text().replace("i < n", "i <= n")),
        (csrc / "factor.cuh", '#pragma once\n#  include  "deep.cuh"\n'),
        (deep, "#define FACTOR 3\n"),
    ):
        path.write_text(text)
        changed, _ = compile_build(PLAIN, ARCH)
        assert changed.content != two.content
    assert len(compiled) == 8
    compile_build(PLAIN, ARCH)
    assert len(compiled) == 8


def test_builds_for_racecheck_are_told_apart(csrc, compiled, monkeypatch):
    compile_build(PLAIN, ARCH)
    monkeypatch.setenv("KDLAB_RACECHECK", "1")
    assert "--define-macro=RACECHECK=1" in jit_build._options(PLAIN, ARCH, find_toolchain())
    compile_build(PLAIN, ARCH)
    monkeypatch.setenv("KDLAB_RACECHECK", "0")
    compile_build(PLAIN, ARCH)
    assert len(compiled) == 2
    for word in ("yes", "2", ""):
        monkeypatch.setenv("KDLAB_RACECHECK", word)
        with pytest.raises(ArgumentError, match=f"RACECHECK: expected 0 or 1 in this .*, got '{word}'"):
            compile_build(PLAIN, ARCH)


def test_another_compiler_is_told_apart(csrc, compiled, monkeypatch):
    compile_build(PLAIN, ARCH)
    other = dataclasses.replace(find_toolchain(), identity="another")
    monkeypatch.setattr(jit_build, "find_toolchain", lambda: other)
    compile_build(PLAIN, ARCH)
    assert len(compiled) == 2


def test_two_clones_share_their_cubins(csrc, compiled, monkeypatch, tmp_path_factory):
    compile_build(PLAIN, ARCH)
    monkeypatch.setattr(jit_build, "CSRC", write_sources(tmp_path_factory.mktemp("clone")))
    compile_build(PLAIN, ARCH)
    assert len(compiled) == 1


def test_what_an_edit_during_the_compilation_made_is_not_kept_as_the_old_text(csrc, monkeypatch):
    compile_now, edits = jit_build.Compiler.compile, ["#define FACTOR 5\n"]

    def edit_first(self, build, arch, toolchain):
        if edits:
            (csrc / "factor.cuh").write_text(edits.pop())
        return compile_now(self, build, arch, toolchain)

    monkeypatch.setattr(jit_build.Compiler, "compile", edit_first)
    five, source = compile_build(PLAIN, ARCH)
    assert source.digest == read_source(csrc / "plain.cu").digest
    (csrc / "factor.cuh").write_text("#define FACTOR 2\n")
    two, _ = compile_build(PLAIN, ARCH)
    assert two.content != five.content


def test_the_cache_drops_what_is_oldest(csrc, compiled, monkeypatch):
    monkeypatch.setattr(jit_cache, "MAX_ENTRIES", 2)
    builds = [Build("plain.cu", (("NUMBER", n),)) for n in range(3)]
    for age, build in enumerate(builds):
        compile_build(build, ARCH)
        for path in (csrc / "cache" / "kernels").glob("*.cubin"):
            os.utime(path, (path.stat().st_mtime - 60,) * 2)
        assert len(entries(csrc)) == 2 * min(age + 1, 2)
    compile_build(builds[2], ARCH)
    compile_build(builds[1], ARCH)
    assert len(compiled) == 3
    compile_build(builds[0], ARCH)
    assert len(compiled) == 4


def test_the_cache_is_where_the_environment_says(csrc, tmp_path, monkeypatch):
    compile_build(PLAIN, ARCH)
    assert len(entries(csrc)) == 2
    monkeypatch.delenv("KDLAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    compile_build(PLAIN, ARCH)
    assert len(list((tmp_path / "xdg" / "kdlab" / "kernels").glob("*.cubin"))) == 1


def test_what_ptxas_prints_is_read():
    log = """ptxas info    : 20 bytes gmem
ptxas info    : Compiling entry function 'one' for 'sm_90a'
ptxas info    : Function properties for one
ptxas         .     64 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 49152 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'two' for 'sm_90a'
ptxas info    : Function properties for two
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers"""
    one, two = parse_resources(log)["one"], parse_resources(log)["two"]
    assert (one.registers, one.stack_bytes, one.spill_bytes, one.shared_bytes) == (255, 64, 20, 49152)
    assert (two.registers, two.stack_bytes, two.spill_bytes, two.shared_bytes) == (8, 0, 0, 0)
    assert parse_resources("") == {}


class Fake:
    """Stands for a loaded kernel."""

    def __init__(self, cubin, name, device, what, dynamic_bytes):
        self.cubin, self.what, self.dynamic_bytes = cubin, what, dynamic_bytes


def use_fakes(monkeypatch, arch=ARCH, capturing=False):
    monkeypatch.setattr(jit, "Kernel", Fake)
    monkeypatch.setattr(jit, "arch_of", lambda device: arch)
    monkeypatch.setattr(jit, "_loaded", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)


def test_an_edit_takes_effect_at_the_next_call(csrc, compiled, monkeypatch):
    use_fakes(monkeypatch)
    first = kernel(PLAIN, "scale", CUDA)
    assert kernel(PLAIN, "scale", CUDA) is first
    (csrc / "factor.cuh").write_text("#define FACTOR 5\n")  # of the same length, in the same tick of the clock
    second = kernel(PLAIN, "scale", CUDA)
    assert second.cubin.content != first.cubin.content
    os.utime(csrc / "factor.cuh")
    assert kernel(PLAIN, "scale", CUDA) is second
    (csrc / "factor.cuh").write_text("#define FACTOR 2\n")
    assert kernel(PLAIN, "scale", CUDA).cubin.content == first.cubin.content
    assert len(compiled) == 2, "the first text is still in the cache"
    (csrc / "factor.cuh").unlink()
    with pytest.raises(BuildError, match=r"factor\.cuh"):
        kernel(PLAIN, "scale", CUDA)


def test_files_are_not_looked_at_while_a_graph_is_captured(csrc, monkeypatch):
    use_fakes(monkeypatch, capturing=True)
    first = kernel(PLAIN, "scale", CUDA)
    (csrc / "plain.cu").unlink()
    assert kernel(PLAIN, "scale", CUDA) is first
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with pytest.raises(BuildError, match=r"plain\.cu cannot be read"):
        kernel(PLAIN, "scale", CUDA)


def test_asking_again_costs_microseconds(csrc, monkeypatch):
    use_fakes(monkeypatch)
    kernel(PLAIN, "scale", CUDA)
    time.sleep(0.1)  # until the time stamps have settled
    kernel(PLAIN, "scale", CUDA)
    monkeypatch.setattr(jit, "_refresh", None)
    best = min(timed(lambda: kernel(PLAIN, "scale", CUDA)) for _ in range(20))
    print(f"{best * 1e6:.1f} us")
    assert best < 30e-6


def timed(call, calls=200):
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def test_what_a_build_declares_reaches_the_kernel(csrc, monkeypatch):
    use_fakes(monkeypatch)
    assert kernel(PLAIN, "scale", CUDA).dynamic_bytes is None
    assert kernel(Build("plain.cu", shared_bytes=(("scale", 70),)), "scale", CUDA).dynamic_bytes == 70


def test_threads_may_ask_at_once(csrc, compiled, monkeypatch):
    use_fakes(monkeypatch)
    found = []
    threads = [threading.Thread(target=lambda: found.append(kernel(PLAIN, "scale", CUDA))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(one) for one in found}) == 1
    assert len(compiled) == 1


def test_a_block_of_launches_looks_once(csrc, monkeypatch):
    use_fakes(monkeypatch)
    time.sleep(0.1)  # until the time stamps have settled
    first = kernel(PLAIN, "scale", CUDA)
    with jit.looking_once():
        assert kernel(PLAIN, "scale", CUDA) is first
        (csrc / "factor.cuh").write_text("#define FACTOR 5\n")
        with jit.looking_once():
            assert kernel(PLAIN, "scale", CUDA) is first
        assert kernel(PLAIN, "scale", CUDA) is first
        other = []
        thread = threading.Thread(target=lambda: other.append(kernel(PLAIN, "scale", CUDA)))
        thread.start()
        thread.join()
        second = kernel(PLAIN, "scale", CUDA)
        assert second is other[0], "the block of one thread is not that of another"
        assert second is not first
    (csrc / "factor.cuh").write_text("#define FACTOR 7\n")
    with jit.looking_once():
        assert kernel(PLAIN, "scale", CUDA) not in (first, second)
