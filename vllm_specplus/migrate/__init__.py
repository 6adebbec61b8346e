"""Turns a start of FastDeploy, PaddleNLP, RTP-LLM or vLLM Ascend into the ``vllm serve`` command that does the same."""

from vllm_specplus.migrate.convert import SYSTEMS, Migration, migrate
from vllm_specplus.migrate.sources import Start, read_command, read_environment, read_yaml

__all__ = ["SYSTEMS", "Migration", "Start", "migrate", "read_command", "read_environment", "read_yaml"]
