"""Parameters live on the host and visit the card for the passes of their block."""

from vramfit.techniques.parameter_offload.offload import (
    GradientPlace,
    ParameterOffload,
    ParameterOffloadSetting,
)

__all__ = ["GradientPlace", "ParameterOffload", "ParameterOffloadSetting"]
