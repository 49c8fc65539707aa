"""The label map in site.yaml: it turns a site's own labels into the job's classes."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from consilium.core.errors import DataError
from consilium.data.datalist import DataList, Item
from consilium.data.settings import Value

Labels = Mapping[Value, tuple[str, ...]]
"""The job's classes by the site's label values or names."""


def with_job_labels(
    data: DataList,
    labels: Labels | None,
    annotated: tuple[str, ...] | None,
    classes: Collection[str] | None,
    ignore_unfit: bool = False,
) -> DataList:
    """Return a data list whose labels are mapped by `labels`, and whose samples have `annotated` unless the list says it.

    `classes`: the job's, None for a task without classes. Items with a mask get the map. Pictures with a class get the job's
    class, or are left out if their class is mapped to an empty list. Raises DataError in three cases: a picture's class is not
    in the map; a picture's class is mapped to none or several of the job's; or an annotated class of the job has no label in
    the map. `ignore_unfit`: in the last two cases, the picture has no class and the mask does not show the class, without an
    error.
    """
    if labels is None and annotated is None:
        return data
    pairs = tuple((labels or {}).items())
    by_name = {str(value): names for value, names in pairs}

    def change(items: Collection[Item]) -> Iterator[Item]:
        for item in items:
            if not isinstance(item, Item):
                raise DataError(
                    f"{data.path}: holds texts, which `labels` and `annotated` of site.yaml are not for; take them out"
                )
            own = replace(item, annotated=annotated) if item.annotated is None else item
            if labels is None or item.label is None:
                yield own
            elif isinstance(item.label, Path):
                shown = [name for name in classes or () if own.annotated is None or name in own.annotated]
                mapped = {name for _, names in pairs for name in names}
                if (lost := [name for name in shown if name not in mapped]) and not ignore_unfit:
                    raise DataError(
                        f"{item.label}: no label in site.yaml stands for class {lost[0]!r} of the job; "
                        "map one to it, or leave it out of `annotated`"
                    )
                left = tuple(name for name in shown if name in mapped) if lost else own.annotated
                yield replace(own, annotated=left, label_map=pairs)
            elif (names := by_name.get(str(item.label))) is None:
                raise DataError(
                    f"{item.image}: class {item.label!r} is not under `labels` of site.yaml; "
                    "map it, or leave its pictures out with an empty list"
                )
            elif names:
                chosen = [name for name in names if classes is None or name in classes]
                if len(chosen) != 1 and not ignore_unfit:
                    told = ", ".join(map(repr, chosen)) or "none of the job's"
                    raise DataError(
                        f"{item.image}: class {item.label!r} is {told} by site.yaml, and a picture has one class; "
                        "map it to one, or leave its pictures out with an empty list"
                    )
                yield replace(own, label=chosen[0] if len(chosen) == 1 else None)

    return replace(data, splits={split: tuple(change(items)) for split, items in data.splits.items()})
