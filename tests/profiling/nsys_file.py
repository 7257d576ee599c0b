"""A small export as Nsight Systems makes it: one round of three launches and a copy, one of them in no range."""

import sqlite3

PID = 7 << 24
TID = PID + 5
KERNEL_COLUMNS = (
    '(start INT, "end" INT, deviceId INT, streamId INT, correlationId INT, globalPid INT, demangledName INT,'
    " shortName INT, gridX INT, gridY INT, gridZ INT, blockX INT, blockY INT, blockZ INT, registersPerThread INT,"
    " graphNodeId INT)"
)
RANGE_COLUMNS = '(start INT, "end" INT, eventType INT, text TEXT, textId INT, globalTid INT, domainId INT)'


def write(path, *, suffix="", nvtx=True, version="3.24.14", kernel_columns=KERNEL_COLUMNS):
    """Write the file and return its path."""
    with sqlite3.connect(path) as file:
        file.execute("create table META_DATA_EXPORT (name TEXT, value TEXT)")
        file.execute("insert into META_DATA_EXPORT values ('EXPORT_SCHEMA_VERSION', ?)", (version,))
        file.execute("create table StringIds (id INT, value TEXT)")
        names = {1: "void attend<(int)4>(float *, int)", 2: "merge(int)", 3: "attention", 4: "round", 5: "layer 2"}
        file.executemany("insert into StringIds values (?, ?)", names.items())
        file.execute("create table TARGET_INFO_GPU (id INT, name TEXT)")
        file.execute("insert into TARGET_INFO_GPU values (0, 'NVIDIA H100')")
        file.execute(f"create table CUPTI_ACTIVITY_KIND_KERNEL{suffix} {kernel_columns}")
        if kernel_columns == KERNEL_COLUMNS:
            file.executemany(
                f"insert into CUPTI_ACTIVITY_KIND_KERNEL{suffix} values (?,?,0,7,?,?,?,?,2,1,1,128,1,1,40,?)",
                [(2000, 5000, 11, PID, 1, 1, None), (6000, 7000, 12, PID, 2, 2, None),
                 (20000, 21000, 13, PID, 2, 2, 9), (50000, 51000, 14, PID, 2, 2, None)],
            )  # fmt: skip
        file.execute(f'create table CUPTI_ACTIVITY_KIND_RUNTIME{suffix} (start INT, "end" INT, correlationId INT,'
                     " globalTid INT, nameId INT)")  # fmt: skip
        # The same correlation number in another process, outside of all ranges, must not mislead.
        calls = [(900, 11, TID + (1 << 24)), (1100, 11, TID), (1300, 12, TID), (1500, 15, TID), (10100, 13, TID),
                 (49000, 14, TID)]  # fmt: skip
        file.executemany(f"insert into CUPTI_ACTIVITY_KIND_RUNTIME{suffix} values (?, 0, ?, ?, 0)", calls)
        file.execute('create table CUPTI_ACTIVITY_KIND_MEMCPY (start INT, "end" INT, deviceId INT, correlationId INT,'
                     " globalPid INT)")  # fmt: skip
        file.execute("insert into CUPTI_ACTIVITY_KIND_MEMCPY values (8000, 8500, 0, 15, ?)", (PID,))
        if nvtx:
            _write_ranges(file, suffix)
    return path


def _write_ranges(file, suffix):
    file.execute(f"create table NVTX_EVENTS{suffix} {RANGE_COLUMNS}")
    made = (0, None, 75, "kdlab", None, TID, 3)
    foreign = (1250, 1400, 59, "gemm", None, TID, 0)
    stages = [(1000, 1600, 59, None, 4, TID, 3), (1040, 1450, 59, None, 5, TID, 3), (1050, 1200, 59, None, 3, TID, 3),
              (1250, 1400, 59, "o_proj", None, TID, 3), (10000, 10200, 59, "round", None, TID, 3)]  # fmt: skip
    file.executemany(f"insert into NVTX_EVENTS{suffix} values (?,?,?,?,?,?,?)", [made, foreign, *stages])
