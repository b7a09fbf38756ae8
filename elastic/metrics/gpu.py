"""What NVML says of this host's GPUs: only where nvidia-ml-py is installed (`pip install elasticd[gpu]`) and finds any.

NVML looks at the driver alone: no CUDA context is made. XIDs are told through the kernel's log, not here.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from typing import Any

from elastic.metrics.catalogue import Samples

logger = logging.getLogger(__name__)


class Gpus:
    """Without NVML there are none."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            count = self._nvml.nvmlDeviceGetCount()
            self._handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
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

    def close(self) -> None:
        if self._handles:
            self._nvml.nvmlShutdown()
            self._handles = []
