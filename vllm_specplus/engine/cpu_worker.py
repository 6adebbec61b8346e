"""The CPU worker, apart from the GPU worker: its base in vLLM can be imported only from vLLM's CPU build."""

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_specplus.engine.worker import SpecPlusWorkerMixin


class SpecPlusCPUWorker(SpecPlusWorkerMixin, CPUWorker):
    """vLLM's CPU worker with the plugin's classes."""
