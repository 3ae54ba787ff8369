"""``torch.save`` and ``torch.load``: the tables and functions behind them."""

from __future__ import annotations

from typing import Any

from vramfit.torch_internals.names import Feature

_FEATURE = Feature("checkpoints")

package_registry: Any = _FEATURE.find("torch.serialization._package_registry")
PyTorchFileReader: Any = _FEATURE.find("torch._C.PyTorchFileReader")
rebuild_parameter: Any = _FEATURE.find("torch._utils._rebuild_parameter")
rebuild_parameter_with_state: Any = _FEATURE.find("torch._utils._rebuild_parameter_with_state")
load_from_bytes: Any = _FEATURE.find("torch.storage._load_from_bytes")
serialization_settings: Any = _FEATURE.find("torch.serialization._serialization_tls")
rebuild_tensor = _FEATURE.place("torch._utils._rebuild_tensor")
rebuild_tensor_of_new_types = _FEATURE.place("torch._utils._rebuild_tensor_v3")
save_to_zip = _FEATURE.place("torch.serialization._save")
