"""Estimates of the FLOPs of a step and of a run, and of the memory of a site's training step, without weights or a GPU.

FLOPs are counted on a model on the meta device. Matrix products count two FLOPs per multiply-add, forward and backward, as in
PyTorch's counter. Elementwise operations are not counted. Hours are FLOPs divided by a stated throughput: an estimate, not a
measurement.

For the memory, the step runs on fake tensors: all operations run without computing numbers, so the bytes alive at each moment
are known. Attention is PyTorch's fused kernel, as on a GPU. Workspaces of GPU kernels and CUDA's own 0.5 GiB or so are not
counted. On a CPU the peak is that of the whole process: PROCESS and HEAP are added, which were measured.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from consilium.adapters import adapter_state
from consilium.adapters.names import is_local_adapter
from consilium.config.job import JobConfig
from consilium.core.errors import ConfigError
from consilium.core.messages import Stage
from consilium.federation.job_assembly import Job, assemble_job, build_meta_model
from consilium.models.low_precision import BLOCK, QUANTIZED, compute_dtype, replace_frozen_linear, store_frozen_as
from consilium.models.meta_device import allow_meta_compute
from consilium.privacy.discrete_gaussian import clipped_sum
from consilium.privacy.plan import max_samples_per_patient
from consilium.strategies.strategy import trained_names
from consilium.tasks.language import ASKS
from consilium.tasks.registry import TASKS
from consilium.tasks.segmentation import prompt_kind_of
from consilium.training.device import has_native_bf16
from consilium.training.sharding import spared_bytes

# FLOPs ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """The number of sites, and the number of samples in each split over all sites together."""

    sites: int
    training: int
    validation: int = 0
    test: int = 0


@dataclass(frozen=True)
class Work:
    """FLOPs per sample. `training`: forward and backward of one fit of the first phase. `scoring`: forward only.

    A preference (DPO) is two rows, and each also goes forward through the base, see `reward_margins`.
    """

    training: int
    scoring: int


def flops_per_sample(job: Job) -> Work:
    """Return the FLOPs per sample. Raises ConfigError for a model that cannot be built on the meta device."""
    config = job.config
    with torch.device("meta"):
        model = build_meta_model(config)
        given = _sample_inputs(config)
        scoring, rows, base = _count_flops(lambda: _run_forward(model, given)), 1, 0
        if getattr(config.task, "learn", "") == "preference":
            with adapter_state.disable_adapter(model):
                rows, base = 2, _count_flops(lambda: _run_forward(model, given))
        # Only the tensors that one fit trains require gradients. A local adapter has its own fit, which costs the same.
        model.train()
        place = (max(1, job.strategy.traits.warm_up), 0)
        trained = {name for name in trained_names(job.strategy, job.initial, *place) if not is_local_adapter(name)}
        for name, tensor in adapter_state.tensors(model).items():
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(name in trained)

        def run_backward() -> None:
            answer = _run_forward(model, given).float().sum()
            if answer.requires_grad:
                answer.backward()

        training = _count_flops(run_backward)
    return Work(rows * (training + base), rows * (scoring + base))


def step_flops(job: Job, work: Work) -> int:
    """Return the FLOPs of one optimizer step at a site, over all accumulated batches."""
    return work.training * _samples_per_step(job.config)


def _samples_per_step(config: JobConfig) -> int:
    """Return the samples of one optimizer step at a site. If patients are the unit, each has the most that a step uses."""
    training, each = config.training, max_samples_per_patient(config.privacy) or 1
    return training.batch_size * training.accumulate * each


def run_flops(job: Job, work: Work, samples: Samples) -> float:
    """Return the FLOPs of a whole run: local training over all sites and rounds, validation and the final evaluation."""
    training, strategy, sites = job.config.training, job.strategy, 1 if job.strategy.traits.pools_data else samples.sites
    federation = job.config.federation
    asked = federation.count_to_train(sites)
    own = samples.training / sites
    seen = training.local_steps * _samples_per_step(job.config) if training.local_steps else own * training.local_epochs
    fits = strategy.traits.phases_of(0) * strategy.traits.fits
    rounds = training.rounds * asked * (fits * seen + strategy.traits.probe_fraction * own) * work.training
    closing = sites * strategy.traits.fits_after_last_round * seen * work.training
    # scored samples: in the rounds, and in the final evaluation; a sample counts each time that it is scored
    scored_rounds = sum(training.validates(r, stage) for r in range(training.rounds) for stage in Stage)
    held = federation.count_to_evaluate(sites - asked) * training.rounds
    scored = (scored_rounds * asked + held) * (samples.validation / sites)
    scored += len(Stage) * (samples.test or samples.validation)
    # with a key-value cache, generating answers costs about one more forward pass per token
    writes = getattr(job.config.task, "evaluate", "") in ASKS
    return rounds + closing + scored * work.scoring * (2 if writes else 1)


def generated_samples(config: JobConfig, sites: int) -> Samples | None:
    """Return the samples of a job with generated data (`data.phantoms`); None for other jobs."""
    made = config.data.phantoms
    return None if made is None else Samples(sites, *(n * sites for n in (made.training, made.validation, made.test)))


def _sample_inputs(config: JobConfig) -> dict[str, Tensor]:
    """Return the model's inputs for one sample of full size: `max_length` tokens, or a picture with its prompts."""
    if length := getattr(config.model, "max_length", 0):
        ids = torch.zeros(1, length, dtype=torch.long)
        if config.task.outputs:
            return {"text": ids}
        return {
            "input_ids": ids,
            "attention_mask": torch.zeros(1, 1, length, length),
        }  # transformers would read the values of a mask with two dimensions
    side = config.model.image_side
    found = {"image": torch.zeros(1, 3, side, side)}
    if kind := prompt_kind_of(config.task):
        found["prompt"] = torch.zeros(1, len(getattr(config.task, "classes", ())), len(kind.numbers))
    return found


def _run_forward(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    if "input_ids" in given:
        read = getattr(model, "text_inputs", dict)  # a vision-language model's pictures are not counted
        return model(**read(**given), use_cache=False).logits
    return model(*given.values())


def _count_flops(run: Any) -> int:
    with FlopCounterMode(display=False) as counter, allow_meta_compute():
        run()
    return counter.get_total_flops()


# memory tracker --------------------------------------------------------------------------------------------------------
# The bytes of tensors, fake or real, that are alive while a model computes.


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of live storages, now and at the peak. The storages `known` are not counted."""

    def __init__(self, known: Set[int]) -> None:
        super().__init__()
        self._known, self._sizes = known, dict[int, int]()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self.add(one)
        return made

    def add(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now until it is freed."""
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self._known and key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += self._sizes[key]
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


# quantized sizes -------------------------------------------------------------------------------------------------------
# Layers with the size of quantized ones, for counting memory without weights or bitsandbytes.
#
# NF4 takes half a byte per number and 4 bytes per 64 numbers; int8 takes 1 byte per number and 4 bytes per row. Both restore a
# layer's whole weight in the computing type for each forward and backward pass, and free it afterwards.


class _Unpacked(torch.autograd.Function):
    """Compute x W' + b with a W that is allocated in the forward and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        """Return (..., out) for x (..., in) and W of `shape` (out, in)."""
        ctx.shape = shape
        return F.linear(x, x.new_empty(shape), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradient for x."""
        return gradients[0] @ gradients[0].new_empty(ctx.shape), None, None


class Packed(nn.Linear):
    """A linear layer whose `weight` has the bytes of a quantized one."""

    W_q = None
    """PEFT's DoRA sees by this attribute that it must call `dequantize` for the whole weight."""

    def dequantize(self) -> Tensor:
        """Return an uninitialized whole weight (out, in), float32."""
        return self.weight.new_empty((self.out_features, self.in_features), dtype=torch.float32)

    def forward(self, input: Tensor) -> Tensor:
        """Return (..., out) for input (..., in). Raises ConfigError for a type that `compute_dtype` refuses."""
        x = input.to(compute_dtype(input))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Unpacked.apply(x, (self.out_features, self.in_features), bias)  # type: ignore[no-any-return, no-untyped-call]


def replace_by_quantized_stand_ins(model: nn.Module, dtype: str, trained: Iterable[Tensor]) -> None:
    """Replace each layer that `store_frozen_as` would quantize by one without values that is as large as in `dtype`.

    `dtype`: "nf4" or "int8".
    """
    replace_frozen_linear(model, trained, dtype, _pack)


def _pack(layer: nn.Linear, dtype: str) -> None:
    numbers = layer.in_features * layer.out_features
    size = -(-numbers // 2) + 4 * -(-numbers // BLOCK) if dtype == "nf4" else numbers + 4 * layer.out_features
    layer.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8, device=layer.weight.device), requires_grad=False)
    layer.__class__ = Packed


# memory ----------------------------------------------------------------------------------------------------------------

MOMENTS = {"adam": 2, "adamw": 2, "sgd": 0}
"""The numbers that an optimizer stores per trained number. SGD with momentum stores one."""
PROCESS = 434 * 2**20
"""Bytes of a process on a CPU beside a step: Python, PyTorch's CPU build, transformers, PEFT, a model's code, a tokenizer.

Measured as the resident memory before the first step of SmolLM2-135M, on Linux with one thread.
"""
HEAP = 1.33
"""The resident bytes of activations on a CPU, relative to their bytes alive at the peak.

The C library keeps freed blocks below 32 MiB, and new ones do not fill them completely. Chosen between three runs of
`simulate` with SmolLM2-135M and four steps: 1.27 with LoRA on q and v and 2 x 128 tokens, 1.24 with 2 x 256, and 1.42 with
LoRA on all linear layers and 4 x 192. The last is the largest sample of a run that was not watched to its end.
"""
BF16: Mapping[str, dict[str, Any]] = {"model": {"dtype": "bf16"}, "training": {"precision": "bf16"}}
"""Needs less memory with nearly equal results. Processors that emulate bf16 take twice as long with it, or more."""
CHECKPOINTING: Mapping[str, dict[str, Any]] = {"training": {"gradient_checkpointing": True}}
"""Needs less memory with equal results."""


@dataclass(frozen=True)
class StepMemory:
    """The bytes of a step at its peak.

    `base`: the frozen base. `trained`: the trained tensors, their gradients and the optimizer's moments. `activations`: the
    rest of the step. `process`: on a CPU, the process without a step.
    """

    base: int
    trained: int
    activations: int
    process: int = 0

    @property
    def peak(self) -> int:
        """The largest number of bytes in use at once."""
        return self.base + self.trained + self.activations + self.process


def memory_of(job: Job, devices: int = 1, sharded: bool = False, gpu: bool = True) -> StepMemory:
    """Return the memory of a step in the job's first round, with samples of full size, on a GPU or (`gpu` false) a CPU.

    It is the memory on the first of the site's `devices`, which split each batch; with `sharded` they also split the base.
    DP-SGD takes one unit at a time, and adds its clipped gradient to an int64 sum. Raises ConfigError for a task without
    `rehearse`, or a model that cannot be built on the meta device.
    """
    config = job.config
    task = TASKS[config.task.name]
    if task.rehearse is None:
        raise ConfigError(f"task.name: {config.task.name!r}: its steps cannot be counted; measure one instead")
    samples = (max_samples_per_patient(config.dpsgd) or 1) if config.dpsgd else -(-config.training.batch_size // devices)
    model = build_meta_model(config)
    if config.model.dtype in QUANTIZED:
        replace_by_quantized_stand_ins(model, config.model.dtype, adapter_state.tensors(model).values())
    else:
        store_frozen_as(model, config.model.dtype, adapter_state.tensors(model).values())
    with FakeTensorMode():
        _materialize(model)
        trained = [p for p in adapter_state.tensors(model).values() if isinstance(p, nn.Parameter)]
        storages = [tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        held = {storage._cdata: storage.nbytes() for storage in storages}
        model.train()
        with (
            MemoryTracker(held.keys()) as live,
            allow_meta_compute(),
            torch.autocast("cpu", torch.bfloat16, enabled=computes_in_bf16(config, gpu)),
        ):
            summed = torch.zeros(sum(p.numel() for p in trained), dtype=torch.int64) if config.dpsgd else None
            task.rehearse(config.task, config.model, model, samples).backward()
            if config.dpsgd:  # each tensor stands for its gradient, which is as large
                clipped_sum({str(n): p.detach()[None] for n, p in enumerate(trained)}, config.dpsgd.clip, summed)
    own = 4 * sum(p.numel() for p in trained)  # float32, and so are gradients and moments
    frozen = sum(held.values()) - own - (spared_bytes(model, devices) if sharded else 0)
    plain = MOMENTS[config.training.optimizer]
    moments = 1 if config.training.optimizer == "sgd" and config.training.momentum else plain
    stepping = own if plain else 0  # temporary tensors of the optimizer's step
    activations = max(live.most - own, stepping)
    heap, process = (1.0, 0) if gpu else (HEAP, PROCESS)
    return StepMemory(frozen, own * (2 + moments), round(heap * activations), process)


def _materialize(model: nn.Module) -> None:
    """Replace the model's meta tensors by fake tensors on the CPU. Tensors that modules share stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in held:
            for name, tensor in ((n, t) for n, t in tensors.items() if t is not None):
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                is_parameter = isinstance(tensor, nn.Parameter)
                fake = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
                tensors[name] = made.setdefault(id(tensor), fake)


def computes_in_bf16(config: JobConfig, gpu: bool) -> bool:
    """Return whether a step computes in bf16, see training/device.py. Steps of DP-SGD never do."""
    return config.dpsgd is None and (config.training.precision == "bf16" or (config.training.precision == "auto" and gpu))


def remedies(config: JobConfig, sharded: bool = False, gpu: bool = True) -> Iterator[tuple[str, JobConfig]]:
    """Yield (settings, changed job) for jobs that need less memory; each adds one setting to the ones before.

    The order is bf16, checkpointing, smaller batches, and last nf4, which changes the base's weights most.
    A `sharded` base cannot be nf4. Without a `gpu` the device is this machine's processor, which may emulate bf16; then bf16 is
    left out.
    """
    raw, said = config.model_dump(mode="json"), dict[str, str]()
    quick = gpu or has_native_bf16()
    nf4 = {"model": {"dtype": "nf4"}, **({"training": {"precision": "bf16"}} if quick else {})}
    first, last = [*([BF16] if quick else []), CHECKPOINTING], [] if sharded else [nf4]
    smaller, batch, accumulate = [], raw["training"]["batch_size"], raw["training"]["accumulate"]
    while batch > 1 and batch % 2 == 0:  # `accumulate` keeps the samples per step
        batch, accumulate = batch // 2, accumulate * 2
        smaller.append({"training": {"batch_size": batch, "accumulate": accumulate}})
    for change in (*first, *smaller, *last):
        changed = raw | {section: raw[section] | fields for section, fields in change.items()}
        if changed == raw or (_bits_per_number(changed) > _bits_per_number(raw)):
            continue
        with suppress(ValidationError, ConfigError):  # settings that this job refuses, such as bf16 under record-level privacy
            found = JobConfig.model_validate(changed)
            kept = raw["model"]["dtype"], raw["training"]["gradient_checkpointing"]
            if (found.model.dtype, found.training.gradient_checkpointing) != kept:
                assemble_job(found)  # raises ConfigError if its model cannot have them
            said |= {f"{s}.{f}": str(v).lower() for s, fields in change.items() for f, v in fields.items() if raw[s][f] != v}
            raw = changed
            yield " ".join(f"{field}={value}" for field, value in said.items()), found


def _bits_per_number(raw: dict[str, Any]) -> int:
    """Return the bits per number of the base."""
    return {"fp32": 32, "bf16": 16, "int8": 8, "nf4": 4}[raw["model"]["dtype"]]
