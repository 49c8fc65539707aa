"""Numbers in Prometheus' text format, for node_exporter's textfile collector: nothing of ours listens anywhere.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PREFIX = "consilium_"


@dataclass(frozen=True)
class Sample:
    """One number. `name` without PREFIX, in Prometheus' base units; `labels` may hold any text."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def exposition(samples: Iterable[Sample], help: Mapping[str, str]) -> str:
    """Return all samples as text, a family after the other, each with its line of `help`. Raises KeyError without one."""
    families: dict[str, list[Sample]] = {}
    for one in samples:
        families.setdefault(one.name, []).append(one)
    lines = []
    for name, members in families.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {PREFIX}{name} {help[name]}", f"# TYPE {PREFIX}{name} {kind}"]
        lines += [f"{PREFIX}{name}{_labels(one.labels)} {_number(one.value)}" for one in members]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in labels.items()]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
