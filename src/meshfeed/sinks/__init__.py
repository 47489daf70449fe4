"""What other systems show of the costs of a run: sinks for `metrics=`. The contract is `metrics.Sink`."""

from meshfeed.sinks.boards import TensorBoard, WandB
from meshfeed.sinks.spans import Spans
from meshfeed.sinks.telemetry import Telemetry

__all__ = ["Spans", "Telemetry", "TensorBoard", "WandB"]
