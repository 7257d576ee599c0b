"""Events as torch.profiler writes them: two repetitions of an eager round of two kernels and a fill, on one thread."""

TID, OTHER = 11, 12


def mark(name, ts, dur, tid=TID):
    """One of our marks."""
    return {"ph": "X", "cat": "user_annotation", "name": name, "tid": tid, "ts": ts, "dur": dur, "args": {}}


def call(correlation, ts, tid=TID, cat="cuda_runtime"):
    """The host's call for a launch."""
    return {"ph": "X", "cat": cat, "name": "launch", "tid": tid, "ts": ts, "dur": 1.0,
            "args": {"correlation": correlation}}  # fmt: skip


def kernel(name, correlation, ts, dur, cat="kernel"):
    """What ran on the GPU."""
    args = {"correlation": correlation, "grid": [2, 1, 1], "block": [128, 1, 1], "registers per thread": 40}
    return {"ph": "X", "cat": cat, "name": name, "tid": 7, "ts": ts, "dur": dur,
            "args": args if cat == "kernel" else {"correlation": correlation}}  # fmt: skip


def eager_round(repeat, begin, first):
    """One repetition that begins at a time, with correlation numbers from `first` on; kernels run late, in order."""
    return [
        mark(f"kdlab:repeat {repeat}", begin, 100.0),
        mark("kdlab:round", begin + 1, 98.0),
        mark("kdlab:layer 1", begin + 2, 20.0),
        mark("kdlab:attention", begin + 3, 10.0),
        mark("gemm", begin + 3, 10.0),
        mark("kdlab:attention", begin, 100.0, OTHER),
        call(first, begin + 4),
        call(first + 1, begin + 14, cat="cuda_driver"),
        call(first + 2, begin + 30),
        kernel("Memset (Device)", first + 2, begin + 210, 1.0, "gpu_memset"),
        kernel("merge", first + 1, begin + 206, 3.0),
        kernel("void attend<4>(float*)", first, begin + 200, 5.0),
    ]


def graph_round(repeat, begin, number):
    """One call for a graph of the same kernels."""
    names = ["void attend<4>(float*)", "merge"]
    kernels = [kernel(name, number, begin + 50 + 3 * place, 2.0) for place, name in enumerate(names)]
    fill = kernel("Memset (Device)", number, begin + 56, 1.0, "gpu_memset")
    return [mark(f"kdlab:repeat {repeat}", begin, 20.0), mark("kdlab:round", begin + 1, 18.0), call(number, begin + 2),
            *kernels, fill]  # fmt: skip
