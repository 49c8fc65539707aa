"""Kinds by name: strategies, models, tasks, adapters, importers. A process imports a kind when something names it.

Other packages add kinds by entry points. Which packages may, the caller says every time: by default none, so that a hospital
runs no code that its administrator has not listed in site.yaml (`plugins:`). A built-in name cannot be replaced.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    SerializationInfo,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from consilium.core.errors import ConfigError
from consilium.core.lazy import resolve
from consilium.core.schema import nearest

K = TypeVar("K")
Plugins = frozenset[str] | None
"""Names of packages whose kinds may be used; None: every installed one, for a researcher's own machine."""
NO_PLUGINS: frozenset[str] = frozenset()


class Registry(Mapping[str, K], Generic[K]):
    """The kinds of one sort by name; as a mapping it is those of this package.

    `built_in`: where each is, as "module:attribute" (a dict there is asked for the name); `group`: the entry points by which
    other packages add theirs; `sort`: the class, as "module:class", that an added kind derives from or is of; `elsewhere`: what
    to write for names that are not kinds here.
    """

    def __init__(
        self,
        what: str,
        built_in: Mapping[str, str],
        group: str = "",
        sort: str = "builtins:object",
        elsewhere: Mapping[str, str] = MappingProxyType[str, str]({}),
    ) -> None:
        self.what, self.group, self.sort, self.elsewhere = what, group, sort, elsewhere
        self._built_in, self._added = dict(built_in), dict[str, K]()
        self.packages: dict[str, tuple[str, str]] = {}
        """The package, and its version, that each added kind came from."""

    def __getitem__(self, name: str) -> K:
        if name in self._added:
            return self._added[name]
        found = _resolve_entry(self._built_in[name], f"{self.what} {name!r}")
        return found[name] if isinstance(found, dict) else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._built_in)

    def __len__(self) -> int:
        return len(self._built_in)

    def find(self, name: object, plugins: Plugins = NO_PLUGINS) -> K:
        """Return a kind: of this package, or of one of `plugins`. Raises KeyError for an unknown name, ConfigError."""
        if not isinstance(name, str):
            raise KeyError(name)
        if name in self._built_in:
            return self[name]
        point = self._point(name, plugins)
        if name not in self._added:
            self._added[name] = _load(point, f"{self.what} {name!r}", self.sort)
            self.packages[name] = (_package(point), point.dist.version if point.dist else "")
        if (other := self.packages[name][0]) != _package(point):  # another job of this process, with another list
            raise ConfigError(f"{self.what} {name!r}: this process runs that of package {other} already; start another")
        return self._added[name]

    def known(self, plugins: Plugins = NO_PLUGINS) -> list[str]:
        """Return all names that `find` knows."""
        return [*self._built_in, *sorted({point.name for point in self._points(plugins)} - self._built_in.keys())]

    def _points(self, plugins: Plugins) -> list[EntryPoint]:
        if plugins is not None and not plugins:
            return []
        wanted = None if plugins is None else {normal(name) for name in plugins}
        return [p for p in entry_points(group=self.group) if wanted is None or normal(_package(p)) in wanted]

    def _point(self, name: str, plugins: Plugins) -> EntryPoint:
        found = [point for point in self._points(plugins) if point.name == name]
        if not found:
            raise KeyError(name)
        if len(found) > 1:
            who = " and ".join(sorted(map(_package, found)))
            raise ConfigError(f"{self.what} {name!r} comes with two packages, {who}; list or install one of them")
        return found[0]


def _resolve_entry(place: str, what: str) -> Any:
    """Return what a registry's line, "module:attribute", names. Raises ConfigError for a line that names nothing."""
    try:
        return resolve(place)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(f"{what}: {place!r} in the registry cannot be loaded ({_why(error)}); correct line or file") from None


def _load(point: EntryPoint, what: str, sort: str) -> Any:
    """Return what an entry point names. Raises ConfigError whatever goes wrong: it is somebody else's code."""
    try:
        kind = point.load()
        _check_sort(kind, sort)
        _fields(_section(kind))
    except Exception as error:
        where = f"package {_package(point)}, entry point {point.value!r}"
        raise ConfigError(f"{what}: {where}: cannot be loaded ({_why(error)}); correct entry point or file") from None
    return kind


def _check_sort(kind: Any, sort: str) -> None:
    """Raise TypeError for what neither derives from the class that `sort` names nor is of it."""
    base = _resolve_entry(sort, "registry")
    if not (isinstance(kind, base) or (isinstance(kind, type) and issubclass(kind, base))):
        found = f"the class {kind.__name__}" if isinstance(kind, type) else f"a {type(kind).__name__}"
        raise TypeError(f"it names {found}, and what is wanted is a {sort.partition(':')[2]}")


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else ""


def normal(name: str) -> str:
    """Return a package's name as installers compare them."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class KindField:
    """Says of a section's field which registry its values belong to: `Annotated[Base, KindField(REGISTRY, "name")]`.

    `key` tells the kinds apart; `default` is the kind where it is left out. The packages whose kinds may be named come with
    the validation's context, under "plugins". A kind is its own class, or has it as `config`.
    """

    registry: Registry[Any]
    key: str
    default: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        write = core_schema.plain_serializer_function_ser_schema(self._write, info_arg=True)
        return core_schema.with_info_plain_validator_function(self._read, serialization=write)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "object", "title": self.registry.what, "kind": self.key, "default_kind": self.default}

    def fields(self) -> list[str]:
        """Return the names of all fields of the kinds of this package, to tell which one was meant."""
        return [field for name in self.registry for field in _fields(_section(self.registry[name]))]

    def _read(self, value: Any, info: ValidationInfo) -> Any:
        """Return a section of its kind's class. Raises ValidationError with the places of what is wrong in it."""
        value = {self.key: value} if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            return self._made(value)
        name, plugins = value.get(self.key, self.default), (info.context or {}).get("plugins", NO_PLUGINS)
        try:
            section = _section(self.registry.find(name, plugins))
        except KeyError:
            raise self._unknown(name, plugins) from None
        if wrong := [own for own in _literal(section, self.key) if own != name][:1]:
            raise self._misnamed(name, wrong[0])
        rest = {key: part for key, part in value.items() if key != self.key}
        made: Any = _adapter(section).validate_python(rest if self.key not in _fields(section) else {self.key: name} | rest)
        if (own := getattr(made, self.key, None)) != name:  # job.yaml is written by the one and read by the other
            raise self._misnamed(name, own)
        return made

    def _misnamed(self, name: object, own: object) -> ConfigError:
        what = f"its class has the {self.key} {own!r}; write {name!r} there"
        return ConfigError(f"{self.registry.what} {name!r}: {what}")

    def _made(self, value: Any) -> Any:
        """Return a section that is one already."""
        if getattr(value, self.key, None) is None:
            raise PydanticCustomError("kind", "a section with `{key}:`", {"key": self.key})
        return value

    def _unknown(self, name: object, plugins: Plugins) -> ValidationError:
        known = self.registry.known(plugins)
        listed = "" if plugins is None else "; a name of another package needs it under `plugins` of site.yaml"
        own = self.registry.elsewhere.get(str(name).lower().replace("_", ""))
        meant = f" (write {own})" if own else nearest(str(name), known)
        told = f"one of {', '.join(known)}{meant}{listed}"
        error = PydanticCustomError("kind", "{told}", {"told": told})
        return ValidationError.from_exception_data("kind", [InitErrorDetails(type=error, loc=(self.key,), input=name)])

    def _write(self, value: Any, info: SerializationInfo) -> dict[str, Any]:
        section: type = type(value)
        mode: Literal["json", "python"] = "json" if info.mode == "json" else "python"
        return {self.key: getattr(value, self.key)} | _adapter(section).dump_python(value, mode=mode)


@cache
def _adapter(section: type) -> TypeAdapter[Any]:
    """Return what reads and writes a section's class; to make it takes longer than to read a job."""
    return TypeAdapter(section)


def _section(kind: Any) -> type:
    """Return the class of a kind's section. Raises TypeError for what is not a kind."""
    section = kind if isinstance(kind, type) else getattr(kind, "config", None)
    if not isinstance(section, type) or not (issubclass(section, BaseModel) or is_dataclass(section)):
        raise TypeError("the entry point names neither a frozen dataclass nor a kind with a config class")
    return section


def _literal(section: type, key: str) -> tuple[Any, ...]:
    """Return the names that a section's class allows for itself, as in `name: Literal["clip"]`; none if it does not say."""
    known = section.model_fields if issubclass(section, BaseModel) else {}
    return get_args(known[key].annotation) if key in known else ()


def _fields(section: type) -> list[str]:
    if issubclass(section, BaseModel):
        return list(section.model_fields)
    return [field.name for field in fields(section)] if is_dataclass(section) else []
