"""What NVML says of this host's GPUs: only where nvidia-ml-py is installed (`pip install elasticd[gpu]`) and finds any.

NVML looks at the driver alone: no CUDA context is made.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from typing import Any

from elastic.metrics.catalogue import Samples

logger = logging.getLogger(__name__)

_EVENTS_A_SCRAPE = 100  # a GPU that falls off the bus can tell of many


class Gpus:
    """Without NVML there are none."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        self._xids: Xids | None = None
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            self._xids = Xids(self._nvml, self._handles)
        except ImportError:
            logger.debug("no metrics of GPUs: nvidia-ml-py is not installed")
        except Exception as exc:  # noqa: BLE001 - NVML's errors have a common base only where it is installed
            logger.debug("no metrics of GPUs: %s", exc)

    def add_to(self, samples: Samples) -> None:
        """What each GPU can say of itself; one without a sensor has no series for it."""
        nvml = self._nvml
        for index, handle in enumerate(self._handles):
            device = str(index)
            with contextlib.suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                samples.add("gpu_memory_used_bytes", memory.used, device)
                samples.add("gpu_memory_limit_bytes", memory.total, device)
            with contextlib.suppress(nvml.NVMLError):
                samples.add("gpu_utilization_ratio", nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100, device)
            with contextlib.suppress(nvml.NVMLError):
                celsius = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
                samples.add("gpu_temperature_celsius", celsius, device)
            with contextlib.suppress(nvml.NVMLError):
                samples.add("gpu_power_watts", nvml.nvmlDeviceGetPowerUsage(handle) / 1000, device)
            with contextlib.suppress(nvml.NVMLError):
                errors = nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
                samples.add("gpu_ecc_errors", errors, device)
        if self._xids is not None:
            self._xids.add_to(samples)

    def close(self) -> None:
        if self._handles:
            if self._xids is not None:
                self._xids.close()
            self._nvml.nvmlShutdown()
            self._handles = []


class Xids:
    """The driver's critical errors, kept by it between two scrapes. A GPU that cannot tell of them has no series."""

    def __init__(self, nvml: Any, handles: list[Any]) -> None:
        self._nvml = nvml
        self._lock = threading.Lock()  # scrapes may come at once
        self._counts: dict[int, int] = {}
        self._newest: dict[int, int] = {}
        self._indices: dict[str, int] = {}
        self._events = nvml.nvmlEventSetCreate()
        for index, handle in enumerate(handles):
            with contextlib.suppress(nvml.NVMLError):  # not told by this GPU, such as in a MIG slice
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
                self._indices[nvml.nvmlDeviceGetUUID(handle)] = index
                self._counts[index] = 0

    def add_to(self, samples: Samples) -> None:
        with self._lock:
            self._take()
            for index, count in self._counts.items():
                samples.add("gpu_xid_errors_total", count, str(index))
            for index, code in self._newest.items():
                samples.add("gpu_last_xid", code, str(index))

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlEventSetFree(self._events)

    def _take(self) -> None:
        nvml = self._nvml
        if not self._counts:
            return
        for _ in range(_EVENTS_A_SCRAPE):
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)  # does not wait
                index = self._indices.get(nvml.nvmlDeviceGetUUID(event.device))
            except nvml.NVMLError:  # a timeout: there are no more
                return
            if index is not None:
                self._counts[index] += 1
                self._newest[index] = int(event.eventData)
