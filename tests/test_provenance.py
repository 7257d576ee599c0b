"""Provenance: JSON-able, unknown facts None, never a failure."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import kdlab
from kdlab import machine
from kdlab.errors import ArgumentError
from kdlab.provenance import COMPARED_FIELDS, RUN_FIELDS, run_provenance


@dataclasses.dataclass(frozen=True)
class Config:
    layers: tuple[int, ...]
    dtype: torch.dtype


def test_it_is_json_and_holds_every_field():
    facts = run_provenance(method="ddtree", budget=32)
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert facts["method"] == "ddtree"
    assert facts["budget"] == 32
    assert facts["template_hash"] is None
    assert set(RUN_FIELDS) <= set(facts)
    assert facts["kdlab_version"] == kdlab.__version__
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["started_utc"].endswith("+00:00")


def test_every_run_has_its_own_id():
    assert run_provenance()["run_id"] != run_provenance()["run_id"]


def test_callers_values_become_json():
    facts = run_provenance(
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        stop_token_ids=frozenset({9, 2}),
        target_config=Config((1, 2), torch.float32),
        temperature=np.float64(0.5),
        seed=torch.tensor(3),
        somewhere=Path("data") / "x",
        unknown={"nested": [np.int64(1), None]},
    )
    assert facts["dtype"] == "bfloat16"
    assert facts["device"] == "cpu"
    assert facts["stop_token_ids"] == [2, 9]
    assert facts["target_config"] == {"layers": [1, 2], "dtype": "float32"}
    assert facts["temperature"] == 0.5
    assert facts["seed"] == 3
    assert facts["somewhere"] == "data/x"
    assert facts["unknown"] == {"nested": [1, None]}
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), b"bytes", torch.tensor([float("nan")])])
def test_values_without_a_json_form_are_refused_by_name(value):
    with pytest.raises(ArgumentError, match=r"setting\.deep"):
        run_provenance(setting={"deep": value})


def test_a_caller_cannot_replace_a_fact():
    with pytest.raises(ArgumentError, match="git_commit"):
        run_provenance(git_commit="mine")


def test_compared_fields_are_fields_of_a_run():
    assert set(COMPARED_FIELDS) <= set(RUN_FIELDS)


def test_without_a_gpu_nothing_is_asked_of_a_driver(monkeypatch):
    def fail(*_):
        raise AssertionError("the driver was asked")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    monkeypatch.setattr(torch.cuda, "current_device", fail)
    facts = run_provenance()
    assert [facts[name] for name in ("driver", "gpu", "gpu_uuid", "gpu_count", "sm_clock_mhz")] == [None] * 5


def test_a_cpu_run_on_a_gpu_machine_has_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert machine.gpu_facts(torch.device("cpu"))["gpu"] is None
    assert set(machine.gpu_state(torch.device("cpu")).values()) == {None}


class FakeNvml:
    """NVML of a host whose second GPU is torch's first."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        pass

    nvmlInit = staticmethod(lambda: None)
    nvmlSystemGetDriverVersion = staticmethod(lambda: b"580.1")
    nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid: uuid)
    nvmlDeviceGetClockInfo = staticmethod(lambda handle, kind: 1000 * kind + len(handle))

    @classmethod
    def nvmlDeviceGetTemperature(cls, *_):
        raise cls.NVMLError("not supported here")


def test_gpu_facts_and_a_sensor_that_does_not_answer(monkeypatch):
    asked = []

    class Properties:
        name, total_memory, multi_processor_count, uuid = "NVIDIA H200", 150 << 30, 132, "abc"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: asked.append(index) or Properties)
    monkeypatch.setitem(__import__("sys").modules, "pynvml", FakeNvml)
    facts = machine.gpu_facts(torch.device("cuda", 1))
    assert set(asked) == {1}
    assert facts["gpu"] == "NVIDIA H200"
    assert facts["gpu_uuid"] == "GPU-abc"
    assert facts["driver"] == "580.1"
    assert facts["sm_clock_mhz"] == 1007.0
    assert facts["memory_clock_mhz"] == 2007.0
    assert facts["gpu_temperature_c"] is None
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert machine.gpu_facts(torch.device("cuda", 1))["driver"] is None


def test_cpu_model_is_read_or_unknown(tmp_path):
    listing = tmp_path / "cpuinfo"
    assert machine.cpu_model(listing) is None
    listing.write_text("processor : 0\n")
    assert machine.cpu_model(listing) is None
    listing.write_text("processor : 0\nmodel name\t: Some: CPU 1\n")
    assert machine.cpu_model(listing) == "Some: CPU 1"
