"""A stand-in for `ncu`: it leaves the file that the child would, and prints the CSV of three launches."""

import json
import sys

RANGES = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
METRICS = {
    "gpu__time_duration.sum": "2,500",
    "dram__bytes_read.sum": "4,000,000",
    "dram__bytes_write.sum": "1000000",
    "lts__t_sectors_op_read.sum": "125,000",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "12.5",
    "sm__cycles_active.avg.pct_of_peak_sustained_elapsed": "40.25",
    "dram__bytes_read.sum.pct_of_peak_sustained_elapsed": "81.25",
    "dram__bytes_write.sum.pct_of_peak_sustained_elapsed": "0.25",
    "launch__registers_per_thread": "168",
    "sm__ops_path_tensor_src_bf16_dst_fp32.sum": "n/a",
}


def line(number, kernel, stack):
    """One line of the raw page; quotes inside a cell are doubled."""
    ranges = "  ".join(f'""kdlab:{name}:none:none:RGB:0xff:REGISTERED:{name}""' for name in stack)
    cells = [str(number), "7", kernel, f"7  {ranges} ", "(264, 1, 1)", "(128, 1, 1)", *METRICS.values()]
    return ",".join(f'"{cell}"' for cell in cells)


def page(launches):
    """What `ncu --csv --page raw --nvtx` prints of launches (kernel, ranges): header, units, lines."""
    header = ",".join(f'"{name}"' for name in ["ID", "Process ID", "Kernel Name", RANGES, "Grid Size", "Block Size",
                                                *METRICS])  # fmt: skip
    units = ",".join(["\"\""] * 6 + ['"ns"', '"byte"', '"byte"', '"sector"', *['"%"'] * 4, '""', '""'])
    lines = [line(number, kernel, stack) for number, (kernel, stack) in enumerate(launches)]
    return "\n".join(["==PROF== Connected to process 7", header, units, *lines, "==PROF== Disconnected", ""])


def leave(facts, works, messages=()):
    """Write the file that the child leaves."""
    states = {"before": {"sm_clock_mhz": 1980.0}, "after": {}}
    provenance = [{"gpu": "NVIDIA H200", "gpu_uuid": "GPU-1", "run_id": run} for run in "ab"]
    with open(facts, "w") as file:
        json.dump({"works": works, "provenance": provenance, "messages": list(messages), **states}, file)


WORK = {"subject": "round", "case": "mini", "simulated": False, "rows": 33, "streams": 1, "context": 64, "layers": 2}
LAUNCHES = [
    ("void attend<(int)4>(float *, int)", ["profiled", "case 0", "round", "layer 1", "attention"]),
    ("merge", ["profiled", "case 0", "round"]),
    ("embed", ["profiled", "case 1", "prefill", "embedding"]),
]

if __name__ == "__main__":
    task = json.loads(sys.argv[-1])
    leave(task["facts"], [(WORK, 0), (WORK | {"case": "mini, prefill of 9 tokens", "rows": 9}, 1)])
    print(page(LAUNCHES))
