"""Numbers in Prometheus' text format, for node_exporter's textfile collector. So Consilium needs no server of its own.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from consilium.core.grouping import group_by_key

PREFIX = "consilium_"
_ESCAPED = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})


@dataclass(frozen=True)
class Sample:
    """One metric's value, in Prometheus' base units. `name` lacks PREFIX; `labels` may hold any text, which is escaped."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def exposition_text(samples: Iterable[Sample], help: Mapping[str, str]) -> str:
    """Return samples as text, grouped by name. `help`: a line per name; a name without one raises KeyError."""
    lines = []
    for name, members in group_by_key((one.name, one) for one in samples).items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {PREFIX}{name} {help[name]}", f"# TYPE {PREFIX}{name} {kind}"]
        for one in members:
            texts = (f'{key}="{text.translate(_ESCAPED)}"' for key, text in one.labels.items())
            labels = "{" + ",".join(texts) + "}" if one.labels else ""
            value = ("+Inf" if one.value > 0 else "-Inf") if math.isinf(one.value) else repr(float(one.value))
            lines.append(f"{PREFIX}{name}{labels} {value}")
    return "\n".join(lines) + "\n"
