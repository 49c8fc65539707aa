"""The server's checks of a site's messages: hello, results, scores. A refused message never ends the round.

The messages come from another machine. So types are checked before values are used, and a site's text is never quoted whole.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Set, Sized
from typing import Any

import torch
from torch import Tensor

from consilium.adapters.adapter_state import LARGEST as LARGEST_ADAPTER
from consilium.core.errors import ConsiliumError, Reason, RefusedError, raise_first
from consilium.core.messages import CAPACITY, Hello, Payload, Tensors, allowed_metrics, is_hash_or_empty
from consilium.core.norms import non_finite_names, norm
from consilium.core.sanitize import count_with_noun, first_names_text, shown
from consilium.federation.compatibility import check_versions
from consilium.federation.job_assembly import Job, metric_names
from consilium.privacy.guard.release import NUMBERS, is_adapter_tensor, upload_shapes
from consilium.privacy.plan import Plan
from consilium.privacy.secagg.arithmetic import layout, vector_length
from consilium.privacy.secagg.server import MASKED
from consilium.report.untrusted_files import LARGEST
from consilium.strategies.strategy import Role, ServerState, Strategy

SMALLEST = 1e-3
"""The smallest average number of ranks per layer that a site may report as its capacity."""
SAMPLES = 10**9
"""The largest number of training samples that a site may report."""
_NAME = re.compile(r"[\w@+-][\w @+.-]{0,127}")
"""The form of a site's name. It becomes a folder in TensorBoard and a part of tensor names in the checkpoint."""
MOST_NAMED = 5
"""The largest number of sites that an error names for one reason."""


def check_hello(hello: Hello, packages: Mapping[str, str]) -> None:
    """Raise RefusedError unless every value of a hello has its type and range, and its versions fit the server's.

    `packages`: the packages that define the job's kinds at the server, with their versions.
    """
    if (
        not isinstance(hello.name, str)
        or not _NAME.fullmatch(hello.name)
        or hello.name == "server"
        or len(hello.name.encode()) > 128
    ):
        raise RefusedError(f"{shown(hello.name, 40)!r} cannot be a site's name; give it one of letters, digits and _-")
    check_versions(hello)
    name = hello.name
    # types first, because an object from a site could define its own equality
    texts = type(hello.plugins) is dict and all(type(word) is str for pair in hello.plugins.items() for word in pair)
    if not texts or hello.plugins != packages:
        wanted = ", ".join(f"{package} {version}" for package, version in packages.items()) or "none"
        raise RefusedError(
            f"{name}: its packages with kinds of this job are others than the server's ({wanted}); install the same"
        )
    if type(hello.num_samples) is not int or hello.num_samples > SAMPLES:
        raise RefusedError(f"{name}: num_samples is not a whole number of at most {SAMPLES}; see that site")
    if hello.num_samples < 0 or (hello.num_samples == 0 and hello.test_only is not True):
        raise RefusedError(
            f"{name}: no training samples; "
            "add entries under `training` to its data list, or set `test_only: true` in its site.yaml"
        )
    flags = type(hello.joined) is bool and type(hello.seeded) is bool
    problems = {
        "joined, seeded, checkpoint or ledger in its hello is malformed; see that site, its version may differ": (
            not flags or not is_hash_or_empty(hello.checkpoint) or not is_hash_or_empty(hello.ledger)
        ),
        "test_only is not a boolean, or it says that it has training samples too; see that site": (
            type(hello.test_only) is not bool or (hello.test_only and hello.num_samples)
        ),
    }
    raise_first(problems, RefusedError, name)
    if not isinstance(hello.capacity, dict) or not hello.capacity.keys() <= CAPACITY:
        raise RefusedError(f"{name}: capacity has other keys than {', '.join(sorted(CAPACITY))}; see that site")
    if not all(_is_number(value) and value >= SMALLEST for value in hello.capacity.values()):
        raise RefusedError(f"{name}: capacity is not a number of at least {SMALLEST:g}; see that site")


def check_update(job: Job, plan: Plan | None, result: Payload, sent: Payload) -> None:
    """Raise RefusedError unless `result` is an update that answers `sent`, with a plausible norm.

    It has exactly the tensors that the strategy uploads, no scalars, and known metrics. Tensors must be plain, finite, and of
    the adapter's type. Numbers must be real and finite.
    """
    masked, names = job.config.secure_aggregation, job.strategy.names(job.initial, Role.SHARED, result.round, result.phase)
    dtypes = {MASKED: torch.int64} if masked else {name: job.initial[name].dtype for name in names}
    if wrong := set(dtypes) ^ result.tensors.keys():
        raise RefusedError(f"tensor {_first_name(wrong)!r} is {'missing' if wrong & set(dtypes) else 'not expected'}")
    for name, dtype in dtypes.items():
        _check_dense_cpu_tensor(name, result.tensors[name], dtype)
    _check_finite(result.tensors)
    if result.scalars:
        raise RefusedError(f"scalar {_first_name(result.scalars)!r} is not expected: a site sends tensors and metrics")
    _check_seal(result)
    _check_metrics(job, result.metrics)
    expected = upload_shapes(job.strategy, sent)
    if masked is not None:  # only the length of a masked update is visible
        length, size = tuple(result.tensors[MASKED].shape), vector_length(layout(expected))
        if length != (size,):
            raise RefusedError(f"masked update has shape {length}, not {(size,)}")
        return
    for name, tensor in result.tensors.items():
        if tuple(tensor.shape) != expected.get(name):
            raise RefusedError(f"tensor {name!r} has shape {tuple(tensor.shape)}, not {expected.get(name)}")
    # The norm is compared with that of the initial adapter (1 if that is 0). The norm of the current adapter would grow with
    # accepted updates, so a site could send larger ones each round. Site-level noise is large by design, so its expected norm
    # is added to the limit.
    adapter, update = job.initial_norm or 1.0, norm(result.tensors)
    noise = plan.clip + plan.site_noise * math.sqrt(sum(tensor.numel() for tensor in result.tensors.values())) if plan else 0.0
    limit = job.config.federation.max_norm_ratio
    if update > limit * (adapter + noise):  # it would ruin the mean for all sites
        against = f"{limit:g} times the adapter's {adapter:.3g}" + (f" and noise of {noise:.3g}" if noise else "")
        raise RefusedError(f"update has norm {update:.3g}, over {against}; see that site, or raise federation.max_norm_ratio")


def check_evaluation(job: Job, result: Payload, round: int, phase: int) -> None:
    """Raise RefusedError unless `result` has only the scores of the evaluation in this round and phase."""
    problems = {
        "stale: the evaluation of another round; it is not recorded": (result.round, result.phase) != (round, phase),
        "an evaluation with tensors or scalars; it is not recorded": result.tensors or result.scalars,
    }
    raise_first(problems, RefusedError)
    _check_seal(result)
    _check_metrics(job, result.metrics)


def check_shared_model(job: Job, result: Payload) -> None:
    """Raise RefusedError unless `result` is one site's whole model, with known names and finite numbers, to be scored."""
    if extra := [name for name in result.tensors if not isinstance(name, str) or not is_adapter_tensor(name, job.initial)]:
        raise RefusedError(f"tensor {_first_name(extra)!r} is none of the adapter's")
    for name, tensor in result.tensors.items():
        own = job.initial.get(name)
        _check_dense_cpu_tensor(name, tensor, torch.float32 if own is None else own.dtype)
        if own is not None and not job.config.adapter_kind.unequal_ranks and tensor.shape != own.shape:
            raise RefusedError(f"tensor {name!r} has shape {tuple(tensor.shape)}, not {tuple(own.shape)}")
    if sum(tensor.numel() for tensor in result.tensors.values()) > LARGEST_ADAPTER:
        raise RefusedError(f"a model of over {LARGEST_ADAPTER:,} numbers")
    _check_finite(result.tensors)
    if result.metrics or result.scalars.keys() != NUMBERS:
        raise RefusedError("a model with other numbers than declared")
    _check_numbers("scalar", result.scalars)
    _check_seal(result)


def _check_seal(result: Payload) -> None:
    if not is_hash_or_empty(result.ledger):
        raise RefusedError("the seal of its privacy ledger is not a SHA-256")


def _check_dense_cpu_tensor(name: str, tensor: Any, dtype: torch.dtype) -> None:
    """Raise RefusedError unless `tensor` is a plain CPU tensor of `dtype` that claims no more numbers than it contains."""
    if (
        type(tensor) is not Tensor
        or tensor.requires_grad
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.device.type != "cpu"
    ):
        raise RefusedError(f"tensor {name!r} is not a plain one on the CPU")
    if tensor.dtype is not dtype:
        raise RefusedError(f"tensor {name!r} is of {tensor.dtype}, not {dtype}")
    if tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        raise RefusedError(f"tensor {name!r} claims more numbers than it brings")


def _check_finite(tensors: Tensors) -> None:
    """Raise RefusedError if a tensor has NaN or Inf. `_check_dense_cpu_tensor` must have checked each tensor before."""
    if wrong := non_finite_names(tensors):
        raise RefusedError(f"tensor {_first_name(wrong)!r} has NaN or Inf")


def _check_metrics(job: Job, metrics: Mapping[str, Any]) -> None:
    """Raise RefusedError unless every metric is a real number that the guard of an honest site may release."""
    known: Set[str] = allowed_metrics(frozenset(metric_names(job.config)))
    if extra := metrics.keys() - known:
        raise RefusedError(f"metric {_first_name(extra)!r} is none of the job's")
    _check_numbers("metric", metrics)


def _check_numbers(kind: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not _is_number(value):
            raise RefusedError(f"{kind} {name!r} is not a real, finite number")


def _is_number(value: Any) -> bool:
    """Tell whether a value is a number that records and pictures can represent. NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _first_name(names: Iterable[Any]) -> str:
    """Return the first name in alphabetical order, sanitized for a message."""
    return min(shown(name, 80) for name in names)


def check_next_state(strategy: Strategy, adapter: Collection[str], state: ServerState, merged: ServerState | None) -> None:
    """Raise ConsiliumError if the strategy's aggregate() returned no valid next state. `adapter`: names of the job's tensors.

    Otherwise the sites would refuse it for an unclear reason, or the run would never end.
    """
    who = f"strategy {strategy.name!r}: aggregate()"
    if not isinstance(merged, ServerState):
        raise ConsiliumError(f"{who} returned {type(merged).__name__}; return the next ServerState")
    if (merged.round, merged.phase) <= (state.round, state.phase):
        raise ConsiliumError(f"{who} stays in round {merged.round}; build on super().aggregate(), which counts")
    if wrong := [n for n, t in merged.optimizer.items() if not isinstance(t, Tensor)]:
        raise ConsiliumError(f"{who} put {wrong[0]!r} into optimizer, which is not a tensor; write torch.tensor(...)")
    # others may keep tensors of their own, of any shape, beside those of the adapter
    fixed = state.shared.keys() if strategy.traits.needs == "sums" else state.shared.keys() & set(adapter)
    if lost := fixed - merged.shared.keys():
        raise ConsiliumError(f"{who} lost tensor {min(lost)!r}; return all of state.shared")
    for name in sorted(fixed):
        if merged.shared[name].shape != (shape := state.shared[name].shape):
            raise ConsiliumError(
                f"{who} returned {name!r} with shape {tuple(merged.shared[name].shape)}, "
                f"expected {tuple(shape)}; keep the shape of every tensor"
            )


def refusals_text(reasons: Mapping[str, str], what: str = "gave no result") -> str:
    """Return which sites did `what` and why, as the beginning of a message that continues with the consequence; "" for none.

    Sites with the same reason are named together.
    """
    by_reason: dict[str, list[str]] = {}
    for name, reason in sorted(reasons.items()):
        by_reason.setdefault(reason, []).append(name)
    told = [f"{first_names_text(names, MOST_NAMED)}: {reason}" for reason, names in by_reason.items()]
    return f"{count_with_noun(len(reasons), 'site')} {what}: {'. '.join(told)}. So " if reasons else ""


def remedy_text(reasons: Mapping[str, str], asked: Sized, quorum: int) -> str:
    """Return the remedy for a round that too few of the `asked` sites answered. `reasons`: by site, its last refusal.

    A site that is ahead of this checkpoint, or has lost its record of the run, cannot take part again, even if others return.
    """
    ahead, lost = (list(reasons.values()).count(word.text) for word in (Reason.TASK, Reason.LEDGER))
    if ahead + lost and len(asked) - ahead - lost < quorum:
        told, steps = [], []
        if ahead:
            told.append(f"{ahead} of {len(asked)} sites say `task`: they are ahead of this checkpoint")
            steps.append("bring the newer checkpoint back, or begin a new run")
        if lost:
            told.append(f"{lost} of {len(asked)} sites say `ledger`: their record of this run cannot be used")
            steps.append("mend what their logs name; a site whose state of this run is lost stays out: then begin a new run")
        return f"{', '.join(told)}, and the others are too few; {'; '.join(steps)}"
    if summed := list(reasons.values()).count(Reason.SUMS.text):
        return (
            f"{summed} of {len(asked)} sites say `sums`: with earlier sums this one would show too few hospitals; "
            "begin a new run with the hospitals of earlier ones, or with `privacy:`; their logs say what else helps"
        )
    if set(reasons.values()) == {Reason.JOB.text}:
        return (
            "every refusal is `job`: where a log names a site's own settings, mend them and resume the run; "
            "else change the job and begin a new one"
        )
    if renewed := first_names_text([n for n, why in sorted(reasons.items()) if why == Reason.CERTIFICATE.text], MOST_NAMED):
        return (
            f"at {renewed} stop the site, move `startup.old` to `startup`, start the site and resume the run; renew after the "
            "run's end. Or begin a new run"
        )
    if reasons:
        return f"mend the cause at {first_names_text(sorted(reasons), MOST_NAMED)}, then resume the run"
    return "see `consilium status JOB`, then resume the run"
