"""Every kernel compiles for every architecture it declares, within that architecture's limits; no GPU needed.

The machine code is read as well: tensor-core kernels hold tensor-core instructions. Compilation runs once for all tests
of this file, two compilers side by side, and its results stay in the user's cache.
"""

import re
import subprocess
from pathlib import Path

import pytest
from cuda import pathfinder

from kdlab.errors import BuildError
from kdlab.kernels.builds import all_builds, matrix_instruction
from kdlab.kernels.jit import PORTABLE, Build, compile_all
from kdlab.kernels.jit.build import compile_build
from kdlab.kernels.jit.source import read_source
from kdlab.paths import CSRC
from tests.kernels.cubin_file import max_threads, sections

SHARED_LIMITS = {"sm_80": 166_912, "sm_89": 101_376, "sm_90a": 232_448, "sm_100a": 232_448, "sm_120a": 101_376}
"""Bytes of shared memory that one block can have."""
REGISTERS = 65_536
"""Registers of a multiprocessor: those of one block must fit."""
BUILDS = all_builds()
JOBS = [(build, arch) for build in BUILDS for arch in build.archs]


@pytest.fixture(scope="module")
def cubins():
    """The cubin, or the error, of every build and architecture."""
    return compile_all(JOBS, workers=2)


def faults(build, arch, cubin, disassemble):
    """Say in words what is wrong with a cubin."""
    what, found = f"{build} for {arch}", []
    if isinstance(cubin, BuildError):
        return [str(cubin)]
    if not cubin.kernels:
        found.append(f"{what}: no kernel")
    for name, uses in cubin.kernels.items():
        shared = uses.shared_bytes + dict(build.shared_bytes).get(name, 0)
        if shared > SHARED_LIMITS[arch]:
            found.append(f"{what}: {name} takes {shared:,} bytes of shared memory, {SHARED_LIMITS[arch]:,} are there")
        threads = max_threads(cubin.content, name)
        if threads is None:
            found.append(f"{what}: {name} has no __launch_bounds__, so nothing says that its registers suffice")
        elif -(-uses.registers // 8) * 8 * threads > REGISTERS:
            found.append(f"{what}: {name} takes {uses.registers} registers in each of {threads} threads")
        if uses.spill_bytes and build.file.startswith("verify_"):
            found.append(f"{what}: {name} spills {uses.spill_bytes} bytes")
    unknown = dict(build.shared_bytes).keys() - cubin.kernels.keys()
    if unknown:
        found.append(f"{what}: shared memory is declared for {unknown}, which are no kernels of it")
    texts = (file.read_text() for file in read_source(build.path).files)
    if not build.shared_bytes and any("extern __shared__" in text for text in texts):
        found.append(f"{what}: uses dynamic shared memory and declares none (Build.shared_bytes)")
    if "Potential Performance Loss" in cubin.log:
        found.append(f"{what}: {cubin.log}")
    instruction = matrix_instruction(build)
    if instruction and f" {instruction}." not in disassemble(cubin.content):
        found.append(f"{what}: no {instruction} in the machine code")
    return found


@pytest.fixture(scope="module")
def disassemble(tmp_path_factory):
    """A function from a cubin to its machine code as text."""
    tool = pathfinder.find_nvidia_binary_utility("nvdisasm")
    if tool is None:
        pytest.skip("nvdisasm is missing (package nvidia-cuda-nvdisasm)")
    folder: Path = tmp_path_factory.mktemp("cubins")

    def text(content):
        path = folder / "kernel.cubin"
        path.write_bytes(content)
        return subprocess.run([tool, "-c", str(path)], capture_output=True, text=True, check=True).stdout

    return text


@pytest.mark.parametrize("file", sorted({build.file for build in BUILDS}))
def test_every_build_compiles_and_fits(file, cubins, disassemble):
    found = []
    for (build, arch), cubin in cubins.items():
        if build.file == file:
            found += faults(build, arch, cubin, disassemble)
    assert found == []


WAITING = sorted(path.name for path in CSRC.glob("*.cu") if "grid_dependency_wait()" in path.read_text())
"""Sources whose kernels may begin before the kernel ahead of them ends."""
READING = {"draft_merge", "verify_merge"}
"""Kernels that read before their wait what kernels before the one ahead wrote: their sources say why it is there."""
ALONE = {"verify_merge_prefix"}
"""Kernels of such sources that are never launched to overlap."""


STARTING = {"add_norm", "norm_rope", "norm_rows", "router_choose"}
STARTING |= {"router_gate", "skinny_linear", "verify_parts"}
"""Kernels that let the next one begin before they have waited themselves: it may run beside the one two ahead."""
AHEAD = {
    "head_norm_rope": "draft_attention",
    "draft_attention": "draft_merge",
    "moe_few_gate_up": "moe_few_down",
    "moe_gate_up": "moe_down, moe_slices",
    "moe_down": "moe_sum",
    "skinny_linear_columns": "norm_rope",
    "verify_attention_wgmma": "verify_parts",
}
"""Kernels, and the one behind each that reads before its own wait what was written before this one waited."""


def before_the_wait(text):
    """Machine code by kernel up to its wait for the kernel ahead; None where it has no wait."""
    kernels = re.findall(r"\.section\s+\.text\.(\w+)(.*?)(?=\.section\s+\.text\.|\Z)", text, re.DOTALL)
    return {name: before if wait else None for name, code in kernels for before, wait, _ in [code.partition("ACQBULK")]}


def early_loads(codes):
    """Plain loads by kernel before its wait for the kernel ahead, where the compiler too may have moved them."""
    found = {}
    for name, code in codes.items():
        loads = [load for load in re.findall(r"\bLDG\.\S*", code or "") if "STRONG" not in load]
        found[name] = ["no wait"] if code is None else loads
    return found


@pytest.mark.parametrize("file", WAITING)
def test_nothing_is_read_before_the_wait_that_is_not_written_there(file, cubins, disassemble):
    builds = [build for build in BUILDS if build.file == file and "sm_90a" in build.archs]
    for build in {builds[0], builds[-1]}:
        codes = before_the_wait(disassemble(cubins[build, "sm_90a"].content))
        assert codes.keys() - ALONE
        found = early_loads(codes)
        early = {name: loads for name, loads in found.items() if loads and name not in READING | ALONE}
        assert early == {}, build
        starting = {name for name, code in codes.items() if code is not None and "PREEXIT" in code}
        assert starting == STARTING & codes.keys(), build


def unread(build):
    """Names of a build's constants that neither its source nor what it includes ever reads."""
    texts = [re.sub("//.*", "", file.read_text()) for file in read_source(build.path).files]
    return [name for name, _ in build.defines if not any(re.search(rf"\b{name}\b", text) for text in texts)]


def test_every_constant_is_read():
    assert {(build.file, name) for build in BUILDS for name in unread(build)} == set()
    assert unread(Build("moe_slices.cu", (("FEATURES", 8), ("PACKED", 1)))) == ["PACKED"]


def test_what_is_read_early_was_written_before_the_kernel_ahead_waited():
    assert STARTING.isdisjoint(AHEAD)


def codes_of(text, csrc, disassemble):
    """What `before_the_wait` finds in a source of one kernel, f."""
    (csrc / "x.cu").write_text(
        'extern "C" __global__ void __launch_bounds__(32) f(const int* n, int* y) {' + text + "}"
    )
    return before_the_wait(disassemble(compile_build(Build("x.cu"), "sm_90a")[0].content))


WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'


def test_a_plain_load_before_the_wait_is_found(csrc, disassemble):
    for load, found in (("n[0]", 1), ("0", 0)):
        text = f"const int first = {load}; if (first > 7) return; {WAIT} y[threadIdx.x] = first + n[1];"
        assert len(early_loads(codes_of(text, csrc, disassemble))["f"]) == found


def test_a_kernel_without_a_wait_is_found(csrc, disassemble):
    assert early_loads(codes_of("y[threadIdx.x] = 1;", csrc, disassemble)) == {"f": ["no wait"]}


def test_a_start_of_the_next_kernel_before_the_wait_is_found(csrc, disassemble):
    launch = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'
    for text, found in ((launch + WAIT, True), (WAIT + launch, False)):
        assert ("PREEXIT" in codes_of(text + "y[threadIdx.x] = n[0];", csrc, disassemble)["f"]) == found


def barriers_of_some(text):
    """Hardware barriers in machine code other than number 0, which is `__syncthreads`."""
    return re.findall(r"\bBAR\.(?:SYNC|ARV|RED)\S* (?!0x0\b).*", text)


@pytest.mark.parametrize("file", ["tree_build.cu", "verify_attention_wgmma.cu"])
def test_a_build_for_racecheck_has_no_barriers_of_some_threads(file, cubins, disassemble, monkeypatch):
    build = next(build for build in BUILDS if build.file == file)
    assert barriers_of_some(disassemble(cubins[build, "sm_90a"].content))
    monkeypatch.setenv("KDLAB_RACECHECK", "1")
    assert barriers_of_some(disassemble(compile_build(build, "sm_90a")[0].content)) == []


def test_barriers_of_some_threads_stand_in_one_header():
    instruction = re.compile(r"\bbar\.(?:sync|arrive|red)|\bbarrier\.cta\b")
    assert [file.name for file in CSRC.iterdir() if instruction.search(file.read_text())] == ["named_barriers.cuh"]


def test_every_source_is_compiled():
    sources, built = {path.name for path in CSRC.glob("*.cu")}, {build.file for build in BUILDS}
    assert sources == built, "each .cu stands in the BUILDS of an op"
    included = {file for build in BUILDS for file in read_source(build.path).files}
    assert set(CSRC.glob("*.cuh")) <= included, "each .cuh is included by one"


def test_portable_means_all_five():
    assert set(SHARED_LIMITS) == set(PORTABLE)
    for build in BUILDS:
        assert len(set(build.archs)) == len(build.archs)


SPILL = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* y) {
  float x[64];
  for (int i = 0; i < 64; ++i) x[i] = y[i * 1024 + threadIdx.x];
  for (int j = 0; j < 8; ++j)
    #pragma unroll
    for (int i = 0; i < 64; ++i) x[i] = x[i] * x[(i * 7 + 3) % 64] + y[j];
  for (int i = 0; i < 64; ++i) y[i * 1024 + threadIdx.x] = x[i];
}
"""
LARGE = """
extern "C" __global__ void __launch_bounds__(32) large(float* y) {
  __shared__ float fixed[10240];
  extern __shared__ float more[];
  for (int i = threadIdx.x; i < 10240; i += 32) fixed[i] = more[i] = y[i];
  __syncthreads();
  y[threadIdx.x] = fixed[10239 - threadIdx.x] + more[threadIdx.x];
}
"""
BROKEN = [
    (Build("verify_x.cu"), SPILL, "sm_80", "spill spills"),
    (Build("x.cu", shared_bytes=(("large", 60_417),)), LARGE, "sm_89", r"takes 101,377 bytes .* 101,376 are there"),
    (Build("x.cu", shared_bytes=(("large", 60_417),)), LARGE, "sm_120a", "takes 101,377 bytes"),
    (Build("x.cu", shared_bytes=(("large", 60_416),)), LARGE, "sm_120a", None),
    (Build("x.cu"), LARGE, "sm_80", "declares none"),
    (Build("x.cu", shared_bytes=(("lagre", 60_416),)), LARGE, "sm_80", "lagre"),
    (Build("x_mma.cu", shared_bytes=(("large", 1),)), LARGE, "sm_80", "no HMMA"),
    (Build("x_wgmma.cu", shared_bytes=(("large", 1),)), LARGE, "sm_90a", "no HGMMA"),
    (Build("x.cu"), "__device__ int f() { return 1; }", "sm_80", "no kernel"),
    (Build("x.cu"), "nonsense", "sm_80", "does not compile"),
    (Build("x.cu"), 'extern "C" __global__ void f() {}', "sm_80", "f has no __launch_bounds__"),
]


@pytest.mark.parametrize(("build", "text", "arch", "what"), BROKEN)
def test_a_broken_kernel_is_found(csrc, disassemble, build, text, arch, what):
    (csrc / build.file).write_text(text)
    found = faults(build, arch, compile_all([(build, arch)], workers=1)[build, arch], disassemble)
    if what is None:
        assert found == []
    else:
        assert re.search(what, "\n".join(found))


def test_threads_are_read_from_the_machine_code(csrc):
    (csrc / "x.cu").write_text('extern "C" __global__ void __launch_bounds__(96, 2) f(int* x) { x[threadIdx.x] = 1; }')
    content = compile_build(Build("x.cu"), "sm_90a")[0].content
    assert max_threads(content, "f") == 96
    assert {".text.f", ".nv.info", ".debug_line"} <= set(sections(content))


def test_a_tensor_core_instruction_is_seen(csrc, disassemble):
    asm = (
        'asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, '
        '{%0,%1,%2,%3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a));'
    )
    (csrc / "x_mma.cu").write_text(
        f'extern "C" __global__ void __launch_bounds__(32) x(float4* y, unsigned a) {{ float d[4] = {{}}; {asm} '
        "y[threadIdx.x] = make_float4(d[0], d[1], d[2], d[3]); }"
    )
    for arch in PORTABLE:
        cubin, _ = compile_build(Build("x_mma.cu"), arch)
        assert faults(Build("x_mma.cu"), arch, cubin, disassemble) == []
