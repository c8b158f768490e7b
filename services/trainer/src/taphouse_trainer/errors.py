"""What can go wrong in the trainer.

::

    TrainerError
    ├── TargetError             the target's checkpoint can't be used (names the file or tensor)
    ├── VocabularyError         a vocabulary mapping that doesn't fit the target or the draft
    ├── CheckpointError         a trainer checkpoint that is damaged or belongs to another run
    ├── SettingsConflict        settings that contradict the checkpoint or each other, or can't be used at all
    ├── AlreadyRunning          another trainer has this output, or this name in the store
    └── ShardRefused            one shard is left out and named; training goes on
        ├── ShardDamaged        missing, truncated, bit-flipped, not finite, unknown format
        ├── WrongLayers         layer ids, layer count or hidden size are not the target's
        ├── WrongFingerprint    states of other weights than the target's
        ├── WrongTokens         token ids outside the target's vocabulary
        └── WitnessContradicts  the engine's own top tokens don't follow from the states

Every message says what was wrong and what to do about it. ``ShardRefused.reason`` is a short word
for metrics and for the consumer record.
"""

from __future__ import annotations


class TrainerError(Exception):
    """Base of everything the trainer raises on purpose."""


class TargetError(TrainerError):
    """The target's checkpoint directory can't be used."""


class VocabularyError(TrainerError):
    """A vocabulary mapping does not fit."""


class CheckpointError(TrainerError):
    """A checkpoint of the trainer can't be loaded."""


class SettingsConflict(TrainerError):
    """Settings contradict the checkpoint that training would resume from, or each other, or are no use."""


class AlreadyRunning(TrainerError):
    """Another trainer writes to this output, or has this name among the store's consumers."""


class ShardRefused(TrainerError):
    """A shard is left out of training."""

    reason = "refused"


class ShardDamaged(ShardRefused):
    """The file is missing, cut, altered, or holds what can't be trained on."""

    reason = "damaged"

    def __init__(self, message: str, reason: str = "damaged") -> None:
        super().__init__(message)
        self.reason = reason


class WrongLayers(ShardRefused):
    """The shard's layers or sizes are not the target's."""

    reason = "layers"


class WrongFingerprint(ShardRefused):
    """The states were made by other weights than the target's."""

    reason = "fingerprint"


class WrongTokens(ShardRefused):
    """Token ids outside the target's vocabulary."""

    reason = "tokens"


class WitnessContradicts(ShardRefused):
    """A sample's states are not those from which the engine chose its tokens."""

    reason = "witness"
