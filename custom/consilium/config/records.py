"""What a job with record-level privacy may not ask for: all that ties the records of one batch together.

DP-SGD's noise is made for a sum that one record moves by the clip at most. That holds only while a record's gradient does not
depend on the records beside it.
"""

from typing import Any

from consilium.schema import SMALLEST_NOISE

APART = ("llama", "mistral", "qwen2", "qwen3")
"""Language models (`model_type`) whose layers are known to keep the rows of a batch apart; experts and recurrences may not."""


def keep_apart(noise_multiplier: float | None, training: Any, adapter: Any, model: Any) -> None:
    """Raise ValueError, naming field, value and remedy, for sections of a record-level job that tie records together."""
    if training.accumulate > 1:
        raise ValueError("training.accumulate: cannot be over 1 with privacy.unit record; raise batch_size instead")
    if training.precision == "bf16":
        what = "rounds a record's gradient by who is beside it, so no privacy.unit record"
        raise ValueError(f"training.precision: 'bf16' {what}; use auto or fp32")
    if dropout := getattr(adapter, "dropout", 0.0):
        what = "draws all masks of a batch at once, which ties records together under privacy.unit record"
        raise ValueError(f"adapter.dropout: {dropout} {what}; use 0")
    if config := getattr(model, "config", None):
        _refuse_tied(config)
    if noise_multiplier is not None and 0 < noise_multiplier < SMALLEST_NOISE:
        what = f"under {SMALLEST_NOISE} no accountant tells it from none"
        raise ValueError(f"privacy.noise_multiplier: {noise_multiplier}: {what}; raise it, or use 0 to clip only")


def _refuse_tied(config: dict[str, Any]) -> None:
    if (kind := config.get("model_type")) not in APART:
        what = f"not known to keep records apart for privacy.unit record; use one of {', '.join(APART)}"
        raise ValueError(f"model.config.model_type: {kind!r}: {what}")
    if name := next((key for key, value in config.items() if "dropout" in key and value), None):
        what = "draws all masks of a batch at once, which ties records together under privacy.unit record"
        raise ValueError(f"model.config.{name}: {config[name]!r} {what}; use 0")
