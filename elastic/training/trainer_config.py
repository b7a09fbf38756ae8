"""What a user may choose about training: one frozen object whose values and relations are checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

from elastic.errors import UsageError
from elastic.training.environment import Every, parse_every

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["fp32", "bf16", "fp16"]
Parallel = Literal["ddp", "dp", "none"]
Compression = Literal["none", "fp16", "bf16", "powersgd"]
Schedule = Literal["constant", "cosine", "linear"]
LrScaling = Literal["none", "linear", "sqrt"]
Nonfinite = Literal["raise", "skip"]
Balance = Literal["even", "speed"]
StartMethod = Literal["fork", "spawn", "forkserver"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """Settings of a `Trainer`. Sizes count items of the dataset; steps are optimizer steps (global batches consumed).

    Raises:
        UsageError: a value is out of range, or two of them contradict each other.
    """

    # How much, in which pieces. Exactly one of steps and epochs.
    global_batch_size: int  # items per step over all ranks; exact at any world size, smaller only at an epoch's end
    micro_batch_size: int  # most items in one forward of one rank
    steps: int | None = None
    epochs: int | None = None
    drop_last: bool = False  # leave out the smaller batch at an epoch's end
    shuffle: bool = True
    seed: int = 0  # of weights, order, dropout and augmentation

    # The update.
    precision: Precision = "fp32"
    grad_clip_norm: float | None = None  # largest L2 norm of the whole gradient
    nonfinite: Nonfinite = "raise"  # what an inf or NaN gradient does without a scaler: end the job, or skip the step
    schedule: Schedule = "constant"
    warmup_steps: int = 0  # linear rise from 0, in applied updates
    final_lr_ratio: float = 0.0  # where cosine and linear end, as a share of the optimizer's rate
    lr_scaling: LrScaling = "none"  # how the optimizer's rate follows global_batch_size / reference_batch_size
    reference_batch_size: int | None = None
    compile: bool = False  # torch.compile
    compile_backend: str = "inductor"

    # Who runs what.
    balance: Balance = "even"  # speed = a rank's share of a step follows its speed; not bit-reproducible then
    speed_every: int = 50  # steps between two comparisons of the ranks' speeds
    straggler_factor: float = 1.5  # a rank that takes so many times the median for a micro-batch is reported

    # Data.
    loader_workers: int = 0  # processes that fetch items ahead; 0 = in the training process
    loader_prefetch: int = 2  # micro-batches ahead per loader worker
    loader_start_method: StartMethod | None = None  # None = the platform's
    loader_timeout_seconds: float = 600.0  # a loader worker that gives nothing for this long is an error

    # Evaluation.
    evaluate_every: int | None = None  # steps
    evaluation_batch_size: int | None = None  # items; None = micro_batch_size

    # How the ranks work together.
    device: Device = "auto"  # auto = this rank's GPU where there is one
    parallel: Parallel = "ddp"  # dp = torch.nn.DataParallel in one process, for comparison
    compression: Compression = "none"  # of gradients on the wire
    powersgd_rank: int = 1
    powersgd_start_step: int = 10  # steps of plain all-reduce before compression begins
    find_unused_parameters: bool = False  # parameters that are not part of every micro-step's loss
    static_graph: bool = False  # DDP's; only without accumulation
    bucket_megabytes: float | None = None  # size of DDP's gradient buckets; None = DDP's default
    collective_timeout_seconds: float = 1800.0

    # Checkpoints. What the operator says on the command line (--checkpoint-dir, --checkpoint-every) wins.
    checkpoint_dir: str | None = None
    checkpoint_every: str | int | None = None  # steps, or time as "30s", "5m"
    checkpoint_keep_last: int = 3
    checkpoint_keep_every: int | None = None  # also keep each checkpoint whose step divides by this
    commit_timeout_seconds: float = 600.0
    memory_every: int | None = None  # steps between two checkpoints in memory; None = as often as costs 1 % at most
    overlap_copies: bool = True  # copy parameters and optimizer state beside the next forward; off: training waits
    allow_fresh_start: bool = False  # begin at step 0 although there are checkpoints and none is good

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_counts()
        self._check_numbers()
        self._check_relations()

    def _check_choices(self) -> None:
        choices = {
            "device": Device,
            "precision": Precision,
            "parallel": Parallel,
            "compression": Compression,
            "schedule": Schedule,
            "lr_scaling": LrScaling,
            "nonfinite": Nonfinite,
            "balance": Balance,
        }
        for name, kind in choices.items():
            if getattr(self, name) not in get_args(kind):
                raise UsageError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(kind))}")
        if self.loader_start_method not in (None, *get_args(StartMethod)):
            raise UsageError(
                f"loader_start_method is {self.loader_start_method!r}; choose one of {', '.join(get_args(StartMethod))}"
            )

    def _check_counts(self) -> None:
        at_least_one = (
            "global_batch_size", "micro_batch_size", "steps", "epochs", "evaluate_every", "evaluation_batch_size",
            "reference_batch_size", "powersgd_rank", "loader_prefetch", "checkpoint_keep_last", "checkpoint_keep_every",
            "speed_every", "memory_every",
        )  # fmt: skip
        optional = {field.name for field in dataclasses.fields(self) if field.default is None}
        for name in at_least_one:
            _check_count(name, getattr(self, name), least=1, optional=name in optional)
        for name in ("loader_workers", "warmup_steps", "powersgd_start_step"):
            _check_count(name, getattr(self, name), least=0, optional=False)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UsageError(f"seed is {self.seed!r}; give a whole number")

    def _check_numbers(self) -> None:
        for name in ("grad_clip_norm", "bucket_megabytes"):
            if (value := getattr(self, name)) is not None and not _is_positive(value):
                raise UsageError(f"{name} is {value!r}; give a number above 0, or None to leave it off")
        for name in ("loader_timeout_seconds", "collective_timeout_seconds", "commit_timeout_seconds"):
            if not _is_positive(getattr(self, name)):
                raise UsageError(f"{name} is {getattr(self, name)!r}; give a number of seconds above 0")
        if not _is_positive(self.straggler_factor) or self.straggler_factor <= 1:
            raise UsageError(f"straggler_factor is {self.straggler_factor!r}; give a number above 1")
        if not 0.0 <= self.final_lr_ratio <= 1.0:
            raise UsageError(f"final_lr_ratio is {self.final_lr_ratio!r}; give a number from 0 to 1")

    def _check_relations(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise UsageError(f"steps is {self.steps} and epochs is {self.epochs}; give exactly one of them")
        if self.micro_batch_size > self.global_batch_size:
            raise UsageError(
                f"micro_batch_size {self.micro_batch_size} is larger than global_batch_size {self.global_batch_size}; "
                "give a micro-batch of at most the global batch"
            )
        if self.lr_scaling != "none" and self.reference_batch_size is None:
            raise UsageError(
                f"lr_scaling is {self.lr_scaling!r} without reference_batch_size; "
                "say for which global batch the optimizer's learning rate is meant"
            )
        if self.steps is not None and self.warmup_steps > self.steps:
            raise UsageError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}; warm up for less")
        if self.balance == "speed" and self.static_graph:
            raise UsageError("balance 'speed' may deal several micro-batches to a rank: static_graph forbids that")
        if self.checkpoint_every is not None:
            parse_every(self.checkpoint_every, name="checkpoint_every")
        if self.parallel != "ddp" and self.compression != "none":
            raise UsageError(f"compression {self.compression!r} has no effect with parallel {self.parallel!r}; drop it")
        if self.compression == "powersgd" and self.powersgd_start_step < 2:
            raise UsageError(f"powersgd_start_step is {self.powersgd_start_step}; PowerSGD needs at least 2")

    @property
    def every(self) -> Every | None:
        """`checkpoint_every`, parsed."""
        return None if self.checkpoint_every is None else parse_every(self.checkpoint_every, name="checkpoint_every")


def _check_count(name: str, value: object, *, least: int, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}; give a whole number of at least {least}")


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
