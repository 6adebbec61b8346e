"""The CPU worker; a module of its own, since vLLM's needs its CPU build to be imported."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specplus.engine.worker import SpecPlusWorkerMixin


class SpecPlusCPUWorker(SpecPlusWorkerMixin, CPUWorker):
    """The CPU worker."""
