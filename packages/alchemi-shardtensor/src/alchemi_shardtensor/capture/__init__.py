"""Capture: steps as CUDA graphs, steps compiled by inductor, and the search for host syncs."""

from alchemi_shardtensor.capture.cuda_graph import WARMUP_CALLS, CapturedStep, SideStream
from alchemi_shardtensor.capture.host_sync import HostSyncDetector, source_line
from alchemi_shardtensor.capture.inductor import compile_step

__all__ = ["WARMUP_CALLS", "CapturedStep", "HostSyncDetector", "SideStream", "compile_step", "source_line"]
