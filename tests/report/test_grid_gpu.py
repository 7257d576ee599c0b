"""Grids on the GPUs that are there: one process a GPU, one GPU a process, its points one after another."""

import pytest

from kdlab import study
from kdlab.report import run_grid
from kdlab.report.grid_local import seen_gpus

CUDA = """\
import os, time, torch
from IPython.display import display
begin = time.time()
product = torch.ones(64, 64, device='cuda') @ torch.full((64, 64), float(budget), device='cuda')
record = {'final': True, 'sum': float(product.sum()), 'gpus': torch.cuda.device_count(), 'begin': begin,
    'visible': os.environ['CUDA_VISIBLE_DEVICES'], 'uuid': str(torch.cuda.get_device_properties(0).uuid)}
time.sleep(0.5)
record['end'] = time.time()
display({'application/vnd.kdlab.result+json': record}, raw=True)"""


@pytest.mark.gpu
@pytest.mark.notebook
def test_every_gpu_runs_points_one_at_a_time(write_notebook, tmp_path):
    gpus = seen_gpus()
    source = write_notebook("P:budget = 1", CUDA)
    points = [{"budget": n} for n in range(1, len(gpus) + 2)]
    run = run_grid(source, points, "gpus", folder=tmp_path)
    assert run.unfinished == []
    table = study.load("gpus", folder=tmp_path)
    assert table["sum"].tolist() == [64.0**3 * n for n in table["budget"]]
    assert set(table["gpus"]) == {1}
    assert set(table["visible"]) == set(gpus)
    assert table.groupby("visible")["uuid"].nunique().eq(1).all()
    assert table["uuid"].nunique() == len(gpus)
    for _, same in table.sort_values("begin").groupby("visible"):
        assert (same["begin"].to_numpy()[1:] >= same["end"].to_numpy()[:-1]).all()
