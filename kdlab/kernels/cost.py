"""What an op must do at least: the numbers its roofline is drawn from. Rates of a machine stand in `kdlab.bench`."""

from dataclasses import dataclass

from kdlab.checks import check_float


@dataclass(frozen=True, slots=True)
class Cost:
    """Fewest bytes and operations of one call, whatever the implementation."""

    bytes: int  # device memory: every input byte once, every output byte once
    flops: int = 0  # on the matrix units; a multiply and an add are two

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    def floor_us(self, *, bytes_per_s: float, flops_per_s: float) -> float:
        """Return the microseconds that no implementation beats: the longer of its bytes' and its operations' time.

        Args:
            bytes_per_s, flops_per_s: the machine's measured ceilings, both above 0.
        """
        check_float("bytes_per_s", bytes_per_s, above=0.0)
        check_float("flops_per_s", flops_per_s, above=0.0)
        return 1e6 * max(self.bytes / bytes_per_s, self.flops / flops_per_s)
