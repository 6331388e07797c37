"""What a pass is written with: `from picompile.passes import Pass`. The package itself is `picompile_passes`."""

from picompile_passes.builder import GraphBuilder
from picompile_passes.infra import Effect, Pass, PassResult
from picompile_passes.pipeline import Pipeline
from picompile_passes.rewriter import Rewriter
from picompile_passes.stages import Stage
from picompile_passes.verify import verify

__all__ = ["Effect", "GraphBuilder", "Pass", "PassResult", "Pipeline", "Rewriter", "Stage", "verify"]
