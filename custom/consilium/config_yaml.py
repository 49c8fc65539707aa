"""Reading YAML that somebody else wrote: bounded in size, in depth and in the length of a value, and without aliases."""

import re
from pathlib import Path
from typing import Any

import yaml

from consilium.errors import ConfigError

LARGEST_FILE = 2**20
LONGEST_VALUE = 4096
DEEPEST = 32
_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml reads a file of the largest size in seconds, Python in a minute


class Loader(_FAST):
    """YAML 1.1 as PyYAML reads it, and numbers as JSON writes them: a pasted config.json has 1e-05, which would be text."""


Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def read_yaml(path: Path) -> Any:
    """Return what a YAML file holds. Raises ConfigError."""
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ConfigError(f"{path}: not a file; give an existing file")
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
        text = data.decode("utf-8")
        _check(text, len(data))
        return yaml.load(text, Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give an existing file") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: no UTF-8, a day of month 13, a number of 5,000 digits
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())[:300]}); fix the line named") from None


def _check(text: str, size: int) -> None:
    """Raise YAMLError for what would take a small file long to read, before any of it is built."""
    if size > LARGEST_FILE:
        raise yaml.YAMLError(f"over {LARGEST_FILE} bytes, which no configuration needs")
    depth = 0
    for event in yaml.parse(text, _FAST):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"line {line}: alias *{event.anchor}: aliases are not read; write the value out")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > LONGEST_VALUE:
            raise yaml.YAMLError(f"line {line}: a value of {len(event.value)} characters, over {LONGEST_VALUE}")
        if depth > DEEPEST:
            raise yaml.YAMLError(f"line {line}: sections in sections over {DEEPEST} deep")
