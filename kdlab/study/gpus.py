"""GPUs by their published rates: what a fitted round is carried over to, as a prediction."""

from dataclasses import dataclass

from kdlab.checks import check_choice


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU.

    Attributes:
        name: of the GPU.
        bytes_per_s: memory bandwidth.
        flops_per_s: dense bfloat16 products with float32 sums.
        memory_bytes: of the GPU.
        link_bytes_per_s: to the other GPUs of its machine, one direction.
        all_reduce_us: of a small all-reduce in a graph, assumed: no data sheet states it.
        published: rates of the data sheet; else measured ones.
    """

    name: str
    bytes_per_s: float
    flops_per_s: float
    memory_bytes: int
    link_bytes_per_s: float
    all_reduce_us: float = 8.0
    published: bool = True

    @property
    def predicted(self) -> bool:
        """Whether times on it are carried over from another GPU."""
        return self.name != MEASURED_H200.name


# Data sheets of the makers, SXM parts where there are several; the workstation card is linked by PCIe 5 x16, where each
# hop of an all-reduce passes the host's root complex.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 3.35e12, 9.89e14, 80 * 10**9, 4.5e11),
        Gpu("H200", 4.8e12, 9.89e14, 141 * 10**9, 4.5e11),
        Gpu("B200", 8.0e12, 2.25e15, 180 * 10**9, 9.0e11),
        Gpu("RTX PRO 6000", 1.792e12, 5.04e14, 96 * 10**9, 6.4e10, all_reduce_us=30.0),
    )
}

MEASURED_H200 = Gpu("H200, measured", 4.2e12, 7.85e14, 141 * 10**9, 4.5e11, published=False)
"""What copies and products reach there: the ceilings that stage times were fitted with."""


def carried_over(name: str) -> Gpu:
    """Return a GPU with the share of its published rates that the measured H200 reaches of its own.

    Raises:
        ArgumentError: the name is not one of `GPUS`.
    """
    check_choice("gpu", name, tuple(GPUS))
    gpu, reference = GPUS[name], GPUS["H200"]
    return Gpu(
        name,
        gpu.bytes_per_s * MEASURED_H200.bytes_per_s / reference.bytes_per_s,
        gpu.flops_per_s * MEASURED_H200.flops_per_s / reference.flops_per_s,
        gpu.memory_bytes,
        gpu.link_bytes_per_s,
        gpu.all_reduce_us,
        published=False,
    )
