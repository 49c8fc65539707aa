"""Saved models of a run: one folder per model, with the job, the tensors for Consilium and for other programs, and a card."""

import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import yaml
from torch import nn

from consilium.adapters import adapter_state
from consilium.adapters.names import LOCAL_ADAPTER, MEAN, SHIFT, is_base, skippable_block
from consilium.config.job import JobConfig
from consilium.core.errors import CheckpointError, raise_first
from consilium.core.messages import Tensors
from consilium.core.storage import (
    PRIVATE,
    load_state,
    make_private_folder,
    name_path_in_errors,
    save_state,
    write_atomic,
    write_json,
)
from consilium.federation.model_card import Card, page
from consilium.models.registry import MODELS
from consilium.privacy.plan import Plan
from consilium.report.tables import only_true
from consilium.strategies.strategy import Role, Strategy
from consilium.tasks.registry import LOWER, TASKS

ADAPTERS, TENSORS, CARD = "adapters", "consilium.safetensors", "README.md"
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The types that an adapter's tensors may have."""


@dataclass(frozen=True)
class SavedModel:
    """A model's adapter tensors (changes of base parameters included), and the settings of its forward pass.

    `rounds`: completed when it was saved. `scaling`: the factor on the adapter. `share`: the weight of a local adapter.
    `similar`: the number of training records with which samples were compared to find that weight, 0 for a fixed one.
    """

    values: Tensors
    rounds: int
    scaling: float = 1.0
    share: float = 0.0
    similar: int = 0

    @property
    def stored_forward_settings(self) -> dict[str, float]:
        """The settings of the forward pass, with `rounds`, as stored in the file."""
        return {"rounds": self.rounds, "scaling": self.scaling, "share": self.share, "similar": self.similar}


def write_adapter_folder(
    folder: Path, kept: SavedModel, export_tensors: Tensors, config: JobConfig, card: Card, plan: Plan | None = None
) -> None:
    """Write an adapter folder, readable by this user only, in place of an older one.

    `export_tensors`: its tensors for other programs, see `convert_changes_to_parameters`. The folder gets its name last, so a
    crash leaves no incomplete folder under that name.
    """
    made = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(made, ignore_errors=True)
    make_private_folder(made)
    notes = {
        f"Beside the adapter runs the site's local one (`local/`), each counting {1 - kept.share:g} and {kept.share:g}.": (
            kept.share
        ),
        "In the final evaluation, the weight of the local adapter was set for each sample by its similarity to "
        f"{kept.similar} training records of the site, at most {kept.share:g}. No file holds these records. A loaded model "
        "uses the maximum weight for every sample, so its scores differ from those above.": kept.similar,
        f"The adapter's part of the forward pass is multiplied by {kept.scaling:g}.": kept.scaling != 1,
    }
    card = replace(card, notes=(*card.notes, *only_true(notes)))
    with name_path_in_errors(made):
        export_adapter(made, export_tensors, config, plan)
    save_state(made / TENSORS, kept.values, {"forward": kept.stored_forward_settings, "card": asdict(card)})
    write_atomic(made / "job.yaml", yaml.safe_dump(config.model_dump(), sort_keys=False).encode())
    write_atomic(made / CARD, page(card).encode())
    for path in made.rglob("*"):
        path.chmod(0o700 if path.is_dir() else PRIVATE)
    shutil.rmtree(folder, ignore_errors=True)
    made.rename(folder)


def read_adapter_folder(folder: Path) -> tuple[SavedModel, Card]:
    """Return the model and card that `write_adapter_folder` wrote. Raises CheckpointError for a missing or damaged file."""
    path = folder / TENSORS
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {TENSORS} there; give an adapter folder, such as RUN/sites/NAME/adapters/global")
    values, meta = load_state(path)
    if bad := sorted(name for name, tensor in values.items() if tensor.dtype not in FLOATS):
        raise CheckpointError(f"{path}: tensor {bad[0]!r} is of {values[bad[0]].dtype}, no float; take what the run wrote")
    if bad := sorted(name for name, tensor in values.items() if not torch.isfinite(tensor).all()):
        raise CheckpointError(f"{path}: tensor {bad[0]!r} has NaN or Inf; take the adapter of another round or run")
    try:
        kept, card = (
            SavedModel(values, **meta["forward"]),
            Card(**{**meta["card"], "notes": tuple(meta["card"].get("notes", ()))}),
        )
        check_scaling_and_share(kept, path)
    except (KeyError, TypeError, OverflowError) as error:
        raise CheckpointError(
            f"{path}: is of another version of consilium ({error}); open it with the one that made it"
        ) from None
    return kept, card


def check_scaling_and_share(kept: SavedModel, path: Path | str) -> None:
    """Raise CheckpointError for a scaling or share that a forward pass cannot have, TypeError for a value that is no number."""
    problems = {
        f"scaling {kept.scaling}: is not a finite number; take what the run wrote": not math.isfinite(kept.scaling),
        f"share {kept.share}: is not within 0 and 1; take what the run wrote": not 0 <= kept.share <= 1,
    }
    raise_first(problems, CheckpointError, path)


def save_if_best(path: Path, kept: SavedModel, config: JobConfig, metric: str, score: float | None) -> None:
    """Save a model if its validation score is the best so far. With `privacy:` save none: no noise covers the choice."""
    if score is None or math.isnan(score) or config.privacy is not None:
        return
    if path.exists():
        before = load_state(path)[1]["score"]
        if (score >= before) if metric in LOWER else (score <= before):
            return
    save_state(path, kept.values, {"forward": kept.stored_forward_settings, "score": score})


def read_best(path: Path) -> tuple[SavedModel, float] | None:
    """Return the model and score that `save_if_best` saved, None if there are none."""
    if not path.exists():
        return None
    values, meta = load_state(path)
    return SavedModel(values, **meta["forward"]), float(meta["score"])


def leading_score_name(config: JobConfig, reported: Iterable[str]) -> str:
    """Return the name of the score by which the job's models are compared, among the `reported` ones."""
    return TASKS[config.task.name].scores(config.task).leading_name(reported)


def load_except_missing_blocks(model: nn.Module, strategy: Strategy, values: Mapping[str, torch.Tensor], who: str) -> set[str]:
    """Load `values` into the model, and skip the blocks whose tensors are missing in `values`; return these blocks.

    Raises CheckpointError for a missing tensor that belongs to no block, or a strategy that skips none. `who` begins the
    message.
    """
    live = {name: tensor for name, tensor in adapter_state.tensors(model).items() if isinstance(tensor, nn.Parameter)}
    absent = {n: skippable_block(n) if strategy.traits.skips_blocks else None for n in live if n not in values}
    if lost := sorted(name for name, block in absent.items() if block is None):
        raise CheckpointError(
            f"{who}: no value for {lost[0]!r}: "
            "the site's state is lost (restart the run) or the adapter's shapes() lacks it (add it)"
        )
    blocks = {block for block in absent.values() if block is not None}
    adapter_state.leave_out(model, blocks)
    adapter_state.load(model, {**values, **{name: torch.zeros_like(live[name]) for name in absent}})
    return blocks


def apply_forward_settings(model: nn.Module, config: JobConfig, kept: SavedModel) -> None:
    """Set the adapter's scaling and the local adapter's share to the saved values."""
    kind = config.adapter_kind
    if kind.scale:
        kind.scale(model, config.adapter, kept.scaling)
    if LOCAL_ADAPTER in config.strategy.traits.parts and kind.mix:
        kind.mix(model, config.adapter, kept.share, False)


def keeps_local(strategy: Strategy, names: Iterable[str]) -> bool:
    """Return whether any of the tensors `names` stays at its site (role LOCAL) in some phase."""
    return any(strategy.role(name, *place) is Role.LOCAL for name in names for place in strategy.traits.phase_schedule())


def convert_changes_to_parameters(model: nn.Module, values: Tensors) -> Tensors:
    """Return `values` for other programs: changes of base parameters become the parameters, under the base's own names."""
    own = {name: tensor for name, tensor in values.items() if not is_base(name)}
    return own | adapter_state.base_plus_changes(model, values)


def export_adapter(folder: Path, values: Tensors, config: JobConfig, plan: Plan | None = None) -> None:
    """Write a whole adapter of a job into `folder`, in the format of its kind, and the summary of a privacy `plan`.

    The vector between encoder and head (feddbe) has a separate file.
    """
    kind, base = config.adapter_kind, MODELS[config.model.name]
    own = {name: tensor for name, tensor in values.items() if name not in (SHIFT, MEAN)}
    kind.export(folder, own, config.adapter, base, f"{config.model.name}-{config.model.variant}")
    if SHIFT in values:
        save_state(folder / "feature_shift.safetensors", {SHIFT: values[SHIFT]}, {})
    if plan is not None:
        write_json(folder / "privacy.json", plan.summary(), indent=1)
