"""The trainer's settings: command line > environment (``TAPHOUSE_TRAINER_*``) > settings file > default.

A settings file holds ``TAPHOUSE_TRAINER_NAME=value`` lines and is named by ``--settings-file``.
The environment is read here and nowhere else.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from taphouse.logs import LogFormat
from taphouse.service_settings import ServiceSettings


class Settings(ServiceSettings):
    """Follow a store's ledger and train an EAGLE-3 draft model from its shards.

    Every option can also be set as TAPHOUSE_TRAINER_<NAME> in the environment, or in a file of such lines
    named by --settings-file.
    """

    model_config = SettingsConfigDict(
        env_prefix="TAPHOUSE_TRAINER_",
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_prog_name="taphouse-trainer",
        cli_implicit_flags=True,
        cli_hide_none_type=True,
    )

    store: Path = Field(description="Root of the store that holds shards and ledger.")
    target: Path = Field(description="Checkpoint directory of the target model.")
    output: Path = Field(
        description="Where checkpoints and the metrics log go; resumed from when it holds any."
    )
    name: str = Field(
        "trainer", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="Name among the store's consumers."
    )
    log_format: LogFormat = Field("text", description="Log lines as text, or as JSON objects.")

    layers: tuple[int, ...] | None = Field(
        None, description="Auxiliary layer ids (default: those of the first shard)."
    )
    draft_vocab_size: int = Field(
        32_000, ge=1, description="Tokens the draft can propose (at most the target's)."
    )
    vocabulary: Path | None = Field(
        None, description="A mapping to use: file with t2d and d2t, or a draft's directory."
    )
    vocabulary_min_tokens: int = Field(
        1_000_000, ge=1, description="Trained tokens to count before a mapping is made."
    )
    draft_layers: int = Field(1, ge=1, description="Decoder layers of the draft.")
    generation: Literal["3", "3.1"] = Field(
        "3", description="EAGLE-3, or 3.1 (norms fused and fed-back states)."
    )
    sliding_window: int | None = Field(None, ge=1, description="Rows the draft looks back (default: all).")

    loss: str = Field("kl_div", description="speculators' loss: a name, or JSON of names and weights.")
    ttt_steps: int = Field(
        3, ge=1, description="How often the draft is unrolled; also the tokens it proposes."
    )
    step_decay: float = Field(1.0, gt=0, description="Factor on the loss of each further unrolled step.")
    lr: float = Field(1e-3, gt=0, description="Learning rate after warm-up.")
    warmup_steps: int = Field(100, ge=0, description="Steps over which the learning rate rises.")
    lr_decay_steps: int | None = Field(
        None, ge=1, description="Step at which the rate, falling as a cosine, is at a tenth."
    )
    weight_decay: float = Field(0.01, ge=0, description="AdamW's weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are clipped to this norm.")
    batch_size: int = Field(4, ge=1, description="Samples a step.")
    sequence_length: int = Field(
        4096, ge=2, description="Rows kept of a sample: the last, up to its last trained token."
    )

    epochs: int | None = Field(
        1, ge=1, description="Passes over the ledger, 'null' for any number; the last follows it on."
    )
    replay_after_s: float = Field(
        30.0, ge=0, description="How long nothing new must land before the next pass begins."
    )
    poll_s: float = Field(0.5, gt=0, description="How often to look for new shards when there are none.")
    held_out_fraction: float = Field(
        0.02, ge=0, lt=1, description="Share of samples, by hash of their id, never trained on."
    )
    held_out_samples: int = Field(64, ge=0, description="How many of those held-out loss is measured on.")
    evaluate_every_steps: int = Field(200, ge=1, description="Steps between held-out losses.")

    checkpoint_every_steps: int = Field(500, ge=1, description="Steps between checkpoints.")
    checkpoint_every_s: float = Field(600.0, gt=0, description="Seconds between checkpoints at most.")
    keep_checkpoints: int = Field(3, ge=1, description="Checkpoints kept, beside the untrained checkpoint-0.")

    stop_after_steps: int | None = Field(None, ge=1, description="End after so many steps.")
    stop_after_samples: int | None = Field(None, ge=1, description="End after so many samples.")
    stop_when_idle_s: float | None = Field(
        None, ge=0, description="In the last pass, end when nothing landed for so long."
    )

    host: str = Field("127.0.0.1", description="Address of /health and /metrics.")
    port: int = Field(8910, ge=0, le=65535, description="Port of /health and /metrics; 0 takes a free one.")
    seed: int = Field(0, description="Seed of initial weights and data order.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: CUDA if there is one.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Compute dtype; auto: bfloat16 on CUDA only."
    )
    threads: int | None = Field(
        None, ge=1, description="CPU threads for torch (default: torch's own choice)."
    )

    @model_validator(mode="after")
    def _endings_fit(self) -> Settings:
        if self.epochs is None and self.stop_when_idle_s is not None:
            raise ValueError("stop_when_idle_s looks at the last pass, and epochs=null has none: set epochs")
        return self

    def pinned(self) -> dict[str, object]:
        """What a checkpoint was trained with and a resumed run can't change."""
        names = ("draft_layers", "generation", "sliding_window", "ttt_steps", "held_out_fraction", "seed")
        return {name: getattr(self, name) for name in names}


def load_settings(arguments: Sequence[str]) -> Settings:
    """Settings from the command line, the environment and the file that ``--settings-file`` names.

    Raises:
        pydantic.ValidationError: a value is missing, unknown or out of range.
        ValueError, OSError: the settings file can't be read, or a value in it or in the environment.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--settings-file", type=Path)
    own, rest = parser.parse_known_args(list(arguments))
    if own.settings_file is not None:
        _check_readable(own.settings_file)
    return Settings(_env_file=own.settings_file, _cli_parse_args=rest)  # type: ignore[call-arg]


def _check_readable(file: Path) -> None:
    """A file that is not there would be passed over in silence."""
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{file} is not UTF-8 ({e})") from e
