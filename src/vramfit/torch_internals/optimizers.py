"""``torch.optim``: foreach functions, and which tensors take them."""

from __future__ import annotations

from typing import Any

from vramfit.torch_internals.names import Feature

_CALIBRATION = Feature("calibrating foreach functions")
_MASTERS = Feature("optimizer steps in float32")
_FEATURE = Feature("following optimizers")

foreach_add: Any = _CALIBRATION.find("torch._foreach_add")
foreach_copy_: Any = _MASTERS.find("torch._foreach_copy_")
foreach_lerp_: Any = _CALIBRATION.find("torch._foreach_lerp_")
foreach_norm: Any = _CALIBRATION.find("torch._foreach_norm")
foreach_types: Any = _FEATURE.find("torch.optim.optimizer._foreach_supported_types")
foreach_utility_types: Any = _FEATURE.find("torch.utils._foreach_utils._foreach_supported_types")
unscale_foreach_: Any = _CALIBRATION.find("torch._amp_foreach_non_finite_check_and_unscale_")
