"""Registries of kinds (strategies, models, tasks, adapters, importers) by name. A kind is imported when it is first used.

Other packages add kinds by entry points. Every call says which packages may do so; the default is none. So a hospital runs no
code that its administrator has not listed in site.yaml (`plugins:`). A built-in name cannot be replaced.
"""

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, entry_points, version
from types import MappingProxyType
from typing import Any, Generic, TypeVar

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
from consilium.core.schema import did_you_mean

_log = logging.getLogger(__name__)
K = TypeVar("K")
Plugins = frozenset[str] | None
"""Names of packages whose kinds may be used; None for every installed package, on a researcher's own machine."""
NO_PLUGINS: frozenset[str] = frozenset()


class Registry(Mapping[str, K], Generic[K]):
    """The kinds of one sort, such as strategies, by name. As a mapping it has only the kinds of this package.

    `what`: the sort's name in messages; `built_in`: the location of each kind, as "module:attribute" (if that is a dict, the
    kind is its entry of that name); `group`: the entry point group for kinds of other packages; `sort`: the class, as
    "module:class", of which an added kind is a subclass or instance; `elsewhere`: by a name that is no kind here, the text to
    suggest instead.
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
        """By added kind, its package and version."""

    def __getitem__(self, name: str) -> K:
        if name in self._added:
            return self._added[name]
        place = self._built_in[name]
        try:
            found = resolve(place)
        except (ImportError, AttributeError, SyntaxError) as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise ConfigError(
                f"{self.what} {name!r}: {place!r} in the registry cannot be loaded ({why}); correct line or file"
            ) from None
        kind = found[name] if isinstance(found, dict) else found
        if wrong := _undecorated_class(kind):
            raise ConfigError(f"{self.what} {name!r}: {wrong}")
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter(self._built_in)

    def __len__(self) -> int:
        return len(self._built_in)

    def find(self, name: object, plugins: Plugins = NO_PLUGINS) -> K:
        """Return a kind of this package or of one of `plugins`.

        Raises KeyError for an unknown name, and ConfigError for a kind that cannot be loaded or comes with two packages. A
        warning names a package whose kind has a built-in name, because that kind is not used.
        """
        if not isinstance(name, str):
            raise KeyError(name)
        if name in self._built_in:
            for package in {_package_name(p) for p in self._entry_points(plugins, cached=True) if p.name == name}:
                _warn_once(f"{self.what} {name!r}: the built-in one is used, not that of package {package}; rename that one")
            return self[name]
        found = [point for point in self._entry_points(plugins) if point.name == name]
        if not found:
            raise KeyError(name)
        if len(found) > 1:
            who = " and ".join(sorted(map(_package_name, found)))
            raise ConfigError(f"{self.what} {name!r} comes with two packages, {who}; list or install one of them")
        point = found[0]
        if name not in self._added:
            try:
                kind: Any = point.load()
                base = resolve(self.sort)
                fits = isinstance(kind, base) or (isinstance(kind, type) and issubclass(kind, base))
                if not fits:
                    sort = f"the class {kind.__name__}" if isinstance(kind, type) else f"a {type(kind).__name__}"
                    raise TypeError(f"it names {sort}, and what is wanted is a {self.sort.partition(':')[2]}")
                if wrong := _undecorated_class(kind):
                    raise TypeError(wrong)
                _field_names(_section_class(kind))
            except Exception as error:  # any error, because it is another package's code
                where = f"{self.what} {name!r}: package {_package_name(point)}, entry point {point.value!r}"
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                raise ConfigError(f"{where}: cannot be loaded ({why}); correct entry point or file") from None
            self._added[name] = kind
            self.packages[name] = (_package_name(point), point.dist.version if point.dist else "")
        # it may have been loaded for another job of this process with other plugins
        if (other := self.packages[name][0]) != _package_name(point):
            raise ConfigError(f"{self.what} {name!r}: this process runs that of package {other} already; start another")
        return self._added[name]

    def known_names(self, plugins: Plugins = NO_PLUGINS) -> list[str]:
        """Return all names that `find` knows."""
        return [*self._built_in, *sorted({point.name for point in self._entry_points(plugins)} - self._built_in.keys())]

    def _entry_points(self, plugins: Plugins, cached: bool = False) -> list[EntryPoint]:
        """Return the entry points of this group and of `plugins`. `cached`: as this process first read them."""
        if plugins is not None and not plugins:
            return []
        points = _installed_points(self.group, tuple(sys.path)) if cached else entry_points(group=self.group)
        wanted = None if plugins is None else {normalize_name(name) for name in plugins}
        return [p for p in points if wanted is None or normalize_name(_package_name(p)) in wanted]


@cache
def _warn_once(text: str) -> None:
    """Log a warning, once per process."""
    _log.warning(text)


@cache
def _installed_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Return a group's entry points, cached for one `path` (sys.path): each built-in name asks, and reading takes 20 ms."""
    return entry_points(group=group)


def _package_name(point: EntryPoint) -> str:
    return point.dist.name if point.dist else ""


def _undecorated_class(kind: object) -> str:
    """Return an error if a class derives from a dataclass, has fields, and is none itself, so they do not count; else ""."""
    if not isinstance(kind, type) or not is_dataclass(kind) or "__dataclass_params__" in vars(kind):
        return ""
    declared = any("ClassVar" not in str(one) for one in vars(kind).get("__annotations__", {}).values())
    return f"class {kind.__name__} is no dataclass; write @dataclass(frozen=True) above it" if declared else ""


def normalize_name(name: str) -> str:
    """Return a package's name in the normalized form by which installers compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class KindField:
    """Connects a field of a section with the registry of its kinds: `Annotated[Base, KindField(REGISTRY, "name")]`.

    `key`: the key that names the kind; `default`: the kind if the key is left out. The packages whose kinds may be named come
    from the validation context, under "plugins". A kind is the section's class itself, or has that class as `config`.
    """

    registry: Registry[Any]
    key: str
    default: str | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        write = core_schema.plain_serializer_function_ser_schema(self._write, info_arg=True)
        return core_schema.with_info_plain_validator_function(self._read, serialization=write)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "object", "title": self.registry.what, "kind": self.key, "default_kind": self.default}

    def kind_field_names(self) -> list[str]:
        """Return the names of all fields of this package's kinds, for suggestions in messages."""
        return [field for name in self.registry for field in _field_names(_section_class(self.registry[name]))]

    def _read(self, value: Any, info: ValidationInfo) -> Any:
        """Return the section as an instance of its kind's class. Raises ValidationError with the location of each problem."""
        value = {self.key: value} if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            if getattr(value, self.key, None) is None:
                raise PydanticCustomError("kind", "a section with `{key}:`", {"key": self.key})
            return value
        name, plugins = value.get(self.key, self.default), (info.context or {}).get("plugins", NO_PLUGINS)
        try:
            section = _section_class(self.registry.find(name, plugins))
        except KeyError:
            known = self.registry.known_names(plugins)
            listed = "" if plugins is None else "; a name of another package needs it under `plugins` of site.yaml"
            elsewhere = self.registry.elsewhere.get(str(name).lower().replace("_", ""))
            meant = f" (write {elsewhere})" if elsewhere else did_you_mean(str(name), known)
            told = f"one of {', '.join(known)}{meant}{listed}"
            error = PydanticCustomError("kind", "{told}", {"told": told})
            details = InitErrorDetails(type=error, loc=(self.key,), input=name)
            raise ValidationError.from_exception_data("kind", [details]) from None
        rest = {key: part for key, part in value.items() if key != self.key}
        made: Any = _type_adapter(section).validate_python(
            rest if self.key not in _field_names(section) else {self.key: name} | rest
        )
        if (own := getattr(made, self.key, None)) != name:  # job.yaml is written with `own` and read with `name`
            raise ConfigError(f"{self.registry.what} {name!r}: its class has the {self.key} {own!r}; write {name!r} there")
        return made

    def _write(self, value: Any, info: SerializationInfo) -> dict[str, Any]:
        section: type = type(value)
        return {self.key: getattr(value, self.key)} | _type_adapter(section).dump_python(
            value, mode="json" if info.mode == "json" else "python"
        )


@cache
def _type_adapter(section: type) -> TypeAdapter[Any]:
    """Return pydantic's adapter for a section's class, cached: making one takes longer than reading a job."""
    return TypeAdapter(section)


def _section_class(kind: Any) -> type:
    """Return the class of a kind's section. Raises TypeError if `kind` is not a kind."""
    section = kind if isinstance(kind, type) else getattr(kind, "config", None)
    if not isinstance(section, type) or not (issubclass(section, BaseModel) or is_dataclass(section)):
        raise TypeError("the entry point names neither a frozen dataclass nor a kind with a config class")
    return section


def _field_names(section: type) -> list[str]:
    if issubclass(section, BaseModel):
        return list(section.model_fields)
    return [field.name for field in fields(section)] if is_dataclass(section) else []


@cache
def installed_version(name: str) -> str | None:
    """Return the version of a package, None if it is not installed, such as one that is part of a job's app/custom.

    It is looked up once per process: it takes milliseconds, and a simulation may have many sites.
    """
    try:
        return version(name)
    except (PackageNotFoundError, ValueError):  # a name from a file may be empty
        return None
