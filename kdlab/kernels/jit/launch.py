"""A loaded kernel: its arguments checked, its configuration prepared once, launched on torch's current stream."""

import functools
from typing import Any

import numpy as np
import torch

from kdlab.errors import ArgumentError, LaunchError, UnsupportedDevice
from kdlab.kernels.jit.arguments import LAST_INT32, Packer, make_packer
from kdlab.kernels.jit.cache import Cubin
from kdlab.kernels.jit.toolchain import HOW_TO_INSTALL, find_toolchain

Dim = int | tuple[int, ...]
_FREE_SHARED_BYTES = 48 * 1024
"""Shared memory of a block up to here needs no opt-in."""
_MAX_CONFIGS = 1024
_MAX_CLUSTER = 8
"""Portable size; 16 needs another opt-in."""


class Kernel:
    """One `extern "C" __global__` function on one GPU, made by `kdlab.kernels.jit.kernel`."""

    def __init__(self, cubin: Cubin, name: str, device: torch.device, what: str, dynamic_bytes: int | None) -> None:
        """Load the cubin; `dynamic_bytes` is the most dynamic shared memory a launch may ask for, None any.

        Raises:
            ArgumentError: the cubin has no kernel of that name.
            UnsupportedDevice: the package cuda-core is missing, or the driver refuses the machine code.
        """
        if name not in cubin.kernels:
            raise ArgumentError("name", f"a kernel of {what}: {', '.join(cubin.kernels)}", repr(name))
        try:
            from cuda.core import ObjectCode, launch
        except ImportError as error:
            raise UnsupportedDevice(f"the package cuda-core is missing ({error}): {HOW_TO_INSTALL}") from error
        self.name, self.what, self.device = name, what, device
        self.resources = cubin.kernels[name]
        self._index, self._launch = device.index, launch
        self._dynamic_bytes, self._opted_bytes = dynamic_bytes, _FREE_SHARED_BYTES
        self._configs: dict[Any, Any] = {}
        self._packers: dict[tuple[type, ...], Packer] = {}
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)  # makes torch's context where nothing has yet
            # The code object owns the machine code: the kernel is valid as long as it lives.
            self._code = ObjectCode.from_cubin(cubin.content, name=what)
            try:
                self._kernel = self._code.get_kernel(name)
                self._sizes = tuple(info.size for info in self._kernel.arguments_info)
            except Exception as error:
                versions = f"its CUDA is {driver_cuda()}, NVRTC is {find_toolchain().nvrtc_version}"
                raise UnsupportedDevice(f"the driver cannot load {what} ({versions}): {error}") from error

    def launch(
        self,
        grid: Dim,
        block: Dim,
        *args: object,
        shared_bytes: int = 0,
        cluster: Dim | None = None,
        overlap: bool = False,
    ) -> None:
        """Queue the kernel on torch's current stream of its GPU; also while a CUDA graph is being captured.

        Args:
            grid: blocks (also with `cluster`), as a number or up to three.
            block: threads of a block, likewise.
            args: a Tensor becomes its pointer, None a null pointer, int an int32, float a float32; numpy scalars stay.
            shared_bytes: dynamic shared memory of a block.
            cluster: blocks of a cluster, which divide `grid`; None means no clusters.
            overlap: start before the kernel before it in the stream has ended (programmatic dependent launch); the
                kernel itself waits in `grid_dependency_wait`. Before Hopper it has no effect.

        Raises:
            ArgumentError: number or type of the arguments, or the configuration, does not fit the kernel.
            UnsupportedDevice: clusters before Hopper, or more shared memory than a block of this GPU can have.
            LaunchError: the driver refused.
        """
        config = self._configs.get((grid, block, shared_bytes, cluster, overlap))
        if config is None:
            config = self._configure(grid, block, shared_bytes, cluster, overlap)
        kinds = tuple(map(type, args))
        packer = self._packers.get(kinds)
        if packer is None:
            packer = self._packers[kinds] = make_packer(args, self._sizes, self.name)
        values = packer.pack(args, self._index, self.name)
        if torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):
                self._queue(config, values)
        else:
            self._queue(config, values)

    def max_clusters(self, block: int, shared_bytes: int, cluster: int) -> int:
        """Return how many clusters of `cluster` blocks run at once on this GPU.

        Args:
            block: threads of a block.
            shared_bytes: dynamic shared memory of a block.
            cluster: blocks of a cluster.

        Raises:
            LaunchError: the driver refused.
        """
        from cuda.bindings import driver

        self._allow_shared(shared_bytes)
        attribute, config = driver.CUlaunchAttribute(), driver.CUlaunchConfig()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attribute.value.clusterDim
        size.x, size.y, size.z = cluster, 1, 1
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes, config.attrs, config.numAttrs = shared_bytes, [attribute], 1
        status, function = driver.cuKernelGetFunction(driver.CUkernel(int(self._kernel.handle)))
        if status == driver.CUresult.CUDA_SUCCESS:
            status, count = driver.cuOccupancyMaxActiveClusters(function, config)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(f"{self.name}: clusters of {cluster} blocks were refused ({status.name})")
        return int(count)

    def _queue(self, config: Any, values: list[Any]) -> None:
        # What torch's own compiled code asks for the stream: 0.2 us, where torch.cuda.current_stream takes 3.5.
        stream = _stream(torch._C._cuda_getCurrentRawStream(self._index))
        try:
            self._launch(stream, config, self._kernel, *values)
        except Exception as error:  # cuda.core's own kind is not public
            raise LaunchError(f"{self.name} of {self.what} with {config} was refused: {error}") from error

    def _configure(self, grid: Dim, block: Dim, shared_bytes: int, cluster: Dim | None, overlap: bool) -> Any:
        from cuda.core import LaunchConfig

        grids = check_dim("grid", grid, (LAST_INT32, 65535, 65535))
        blocks = check_dim("block", block, (1024, 1024, 64))
        if np.prod(blocks) > 1024:
            raise ArgumentError("block", "at most 1,024 threads", block)
        hopper = torch.cuda.get_device_capability(self._index) >= (9, 0)
        options: dict[str, Any] = {"programmatic_stream_serialization": overlap and hopper}
        if cluster is not None:
            clusters = check_dim("cluster", cluster, (_MAX_CLUSTER,) * 3)
            if np.prod(clusters) > _MAX_CLUSTER:
                raise ArgumentError("cluster", f"at most {_MAX_CLUSTER} blocks", cluster)
            if any(n % size for n, size in zip(grids, clusters, strict=True)):
                raise ArgumentError("grid", f"a multiple of the cluster {cluster}", grid)
            if not hopper:
                raise UnsupportedDevice(f"{self.name}: clusters need compute capability 9.0")
            options["cluster"] = clusters
            # cuda.core counts clusters where CUDA's own launch counts blocks.
            grids = tuple(n // size for n, size in zip(grids, clusters, strict=True))
        self._allow_shared(shared_bytes)
        if len(self._configs) >= _MAX_CONFIGS:
            self._configs.clear()
        config = LaunchConfig(grid=grids, block=blocks, shmem_size=shared_bytes, **options)
        self._configs[grid, block, shared_bytes, cluster, overlap] = config
        return config

    def _allow_shared(self, dynamic: int) -> None:
        """Check the dynamic shared memory of a block, and opt in where it needs that: the value is only ever raised."""
        if not isinstance(dynamic, int) or dynamic < 0:
            raise ArgumentError("shared_bytes", "a number of bytes", repr(dynamic))
        if self._dynamic_bytes is not None and dynamic > self._dynamic_bytes:
            raise ArgumentError("shared_bytes", f"at most the {self._dynamic_bytes:,} that the build declares", dynamic)
        total = dynamic + self.resources.shared_bytes
        if total <= self._opted_bytes:
            return
        from cuda.bindings import driver

        most = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        _, limit = driver.cuDeviceGetAttribute(most, driver.CUdevice(self._index))
        if total > limit:
            gpu = torch.cuda.get_device_name(self._index)
            raise UnsupportedDevice(f"{self.name} needs {total:,} bytes of shared memory a block, {gpu} has {limit:,}")
        (status,) = driver.cuKernelSetAttribute(
            driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
            dynamic,
            driver.CUkernel(int(self._kernel.handle)),
            driver.CUdevice(self._index),
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise LaunchError(f"{self.name}: {dynamic:,} bytes of dynamic shared memory were refused ({status.name})")
        self._opted_bytes = total


def check_dim(name: str, value: Dim, limits: tuple[int, ...]) -> tuple[int, ...]:
    """Return `value` as three numbers from 1 to `limits`, or raise ArgumentError."""
    dims = (value,) if isinstance(value, int) else value
    good = isinstance(dims, tuple) and 1 <= len(dims) <= 3 and all(isinstance(n, int) for n in dims)
    if not good or not all(1 <= n <= limit for n, limit in zip(dims, limits, strict=False)):
        raise ArgumentError(name, f"one to three integers from 1 to {limits}", repr(value))
    return (*dims, 1, 1)[:3]


def driver_cuda() -> str:
    """Return the newest CUDA version that the driver runs; only for a machine with a GPU."""
    from cuda.bindings import driver

    _, version = driver.cuDriverGetVersion()
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.lru_cache(maxsize=256)
def _stream(handle: int) -> Any:
    """Return cuda.core's view of the stream with this handle; torch keeps the stream."""
    from cuda.core import Stream

    return Stream.from_handle(handle)
