"""A weight transfer engine for vLLM that reads a checkpoint's files: a trainer's part, without its GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class Nothing(WeightTransferInitInfo):
    """There is nobody to meet."""


@dataclass
class Part(WeightTransferUpdateInfo):
    """The `part`-th of `parts` shares of a checkpoint's tensors."""

    checkpoint: str
    part: int
    parts: int


class FileWeightTransferEngine(WeightTransferEngine[Nothing, Part]):
    """Loads as vLLM's own engines do: layer by layer, between a start and a finish."""

    init_info_cls, update_info_cls = Nothing, Part

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Nobody to meet."""

    def start_weight_update(self) -> None:
        """Make room for what comes."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """All is there."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As vLLM's, without waiting for an accelerator, of which there is none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Part) -> None:
        """Load one share."""
        tensors = sorted(load_file(Path(update_info.checkpoint) / "model.safetensors").items())
        self.model.load_weights(tensors[update_info.part :: update_info.parts])

    def shutdown(self) -> None:
        """Nothing is open."""
