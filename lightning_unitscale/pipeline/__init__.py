"""Pipelines: one module cut into stages for several devices."""

from torch.distributed.pipelining import SplitPoint, pipe_split

from lightning_unitscale.pipeline.balance import balanced_split
from lightning_unitscale.pipeline.cuts import annotate_split_points
from lightning_unitscale.pipeline.engine import PipelineRunner
from lightning_unitscale.pipeline.explain import PipelinePlan, explain_pipeline, explain_step
from lightning_unitscale.pipeline.pipe import Pipe, PipeInfo, pipeline
from lightning_unitscale.pipeline.program import LossWrapper, TrivialLossWrapper
from lightning_unitscale.pipeline.schedules import SCHEDULES, Schedule
from lightning_unitscale.pipeline.stage import StageInfo, StageModule

__all__ = [
    "SCHEDULES",
    "LossWrapper",
    "Pipe",
    "PipeInfo",
    "PipelinePlan",
    "PipelineRunner",
    "Schedule",
    "SplitPoint",
    "StageInfo",
    "StageModule",
    "TrivialLossWrapper",
    "annotate_split_points",
    "balanced_split",
    "explain_pipeline",
    "explain_step",
    "pipe_split",
    "pipeline",
]
