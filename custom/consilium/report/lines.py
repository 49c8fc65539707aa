"""What a line of metrics.jsonl holds, by event, as runlog.py writes it; it may have more than is read anywhere."""

import math
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

LARGEST = 3.4028234663852886e38
"""The largest number a site may report: TensorBoard keeps single precision."""
Number = Annotated[float, AfterValidator(lambda value: value if abs(value) <= LARGEST else math.nan)]
"""A metric; one that is no finite number of single precision is NaN."""
Numbers = dict[str, Number]
Count = Annotated[int, Field(ge=-1, le=10**6)]
"""A round, a phase (HELD_OUT is -1) or how many of them."""
Size = Annotated[int, Field(ge=0, le=10**15)]
"""How many parameters."""


class Strict(BaseModel):
    """Values of their kind: "1" and true are no numbers."""

    model_config = ConfigDict(strict=True)


class _Placed(Strict):
    round: Count
    phase: Count


class _Asked(_Placed):
    sites: list[str]


class _Noted(_Placed):
    values: Numbers


class _Named(Strict):
    site: str
    round: Count


class _Refused(_Named):
    reason: str


class _Evaluated(_Named):
    metrics: Numbers


class _Trained(_Evaluated):
    phase: Count


class _Ended(Strict):
    round: Count
    rounds: Count
    validations: Count
    best_round: Count


class _Parameters(_Placed):
    shared: Size
    local: Size
    frozen: Size


LINES: dict[str, type[Strict]] = {
    "started": _Asked, "concluded": _Asked, "result": _Trained, "held_out": _Evaluated, "final": _Evaluated,
    "joined": _Named, "refused": _Refused, "resumed": _Placed, "diagnostics": _Noted, "ended": _Ended,
    "parameters": _Parameters,
}  # fmt: skip
"""The events that pages and comparisons are made of."""
