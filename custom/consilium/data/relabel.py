"""A site's own labels in the job's terms, by the map in site.yaml."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from consilium.data.datalist import DataList, Item
from consilium.data.settings import Value
from consilium.errors import DataError

Labels = Mapping[Value, tuple[str, ...]]
"""Classes by the site's label values or names."""


def relabelled(
    data: DataList, labels: Labels | None, annotated: tuple[str, ...] | None, classes: Collection[str] | None
) -> DataList:
    """Return a data list with every sample's labels as `labels` say, and `annotated` where the list does not say it.

    `classes` are the job's, None for a task without any. Masks get their map along, pictures of a class their new class; those
    whose class has an empty list are left out. Raises DataError for a class that is not in the map, and for a class of the job
    that no label stands for although masks are said to show it.
    """
    if labels is None and annotated is None:
        return data
    splits = {split: tuple(_relabelled(data.path, items, labels, annotated, classes)) for split, items in data.splits.items()}
    return replace(data, splits=splits)


def _relabelled(
    path: Path,
    items: Collection[Item],
    labels: Labels | None,
    annotated: tuple[str, ...] | None,
    classes: Collection[str] | None,
) -> Iterator[Item]:
    known = None if labels is None else {str(value): names for value, names in labels.items()}
    pairs = None if labels is None else tuple(labels.items())
    for item in items:
        if not isinstance(item, Item):
            raise DataError(f"{path}: holds texts, which `labels` and `annotated` of site.yaml are not for; take them out")
        own = replace(item, annotated=annotated) if item.annotated is None else item
        if isinstance(item.label, Path) and labels is not None:
            _check_shown(own, labels, classes or ())
            yield replace(own, label_map=pairs)
        elif known is None or item.label is None or isinstance(item.label, Path):
            yield own
        elif (name := _class(item, known, classes)) is not None:
            yield replace(own, label=name)


def _check_shown(item: Item, labels: Labels, classes: Collection[str]) -> None:
    """Raise DataError for a class that the item's mask is said to show, and that no label stands for."""
    mapped = {name for names in labels.values() for name in names}
    shown = set(classes) if item.annotated is None else set(classes) & set(item.annotated)
    if lost := [name for name in classes if name in shown - mapped]:
        remedy = "map one to it, or leave it out of `annotated`"
        raise DataError(f"{item.label}: no label in site.yaml stands for class {lost[0]!r} of the job; {remedy}")


def _class(item: Item, labels: Mapping[str, tuple[str, ...]], classes: Collection[str] | None) -> str | None:
    """Return the job's class of a picture, None if it has none. Raises DataError unless the map says which one."""
    if str(item.label) not in labels:
        what = f"class {item.label!r} is not under `labels` of site.yaml"
        raise DataError(f"{item.image}: {what}; map it, or leave its pictures out with an empty list")
    names = labels[str(item.label)]
    chosen = [name for name in names if classes is None or name in classes]
    if names and len(chosen) != 1:
        told = ", ".join(map(repr, chosen)) or "none of the job's"
        what = f"class {item.label!r} is {told} by site.yaml, and a picture has one class"
        raise DataError(f"{item.image}: {what}; map it to one, or leave its pictures out with an empty list")
    return chosen[0] if chosen else None
