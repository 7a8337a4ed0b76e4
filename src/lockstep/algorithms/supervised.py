"""Supervised learning: each iteration takes the next batch of a data set and makes one update with AdamW.

AdamW: Loshchilov & Hutter, 2017, arXiv:1711.05101.

Shapes: L local lanes, M examples per lane; a batch is [L x M, ...] in lane order.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from lockstep.base import Algorithm, Dataset
from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig
from lockstep.data.dataloader import DataLoader
from lockstep.distributed import DistributedOptimizer, FusedAdam
from lockstep.metrics import Metrics
from lockstep.nn.networks import MLPConfig, NetworkConfig, check_network
from lockstep.ops.functional import Scaling, lr_scale, schedule
from lockstep.protocols import BenchmarkOp, Loss, Policy, TargetType
from lockstep.pytree import Tree, tree_map
from lockstep.rng import seeded_torch
from lockstep.transfer import Uploader


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(Algorithm.Config):
    """Settings of supervised learning. Every number is for the whole run, not for one process."""

    learning_rate: float = 1e-3
    """Peak learning rate; `schedule` shapes it over the run."""
    schedule: Literal["constant", "linear", "cosine", "plateau"] = "cosine"
    """Schedule of the learning rate from its peak over the run. plateau: halve it when evaluations stop improving."""
    plateau_patience: int = 3
    """Consecutive evaluations without improvement per halving of the learning rate by the plateau schedule."""
    warmup_fraction: float = 0.05
    """Fraction of the run over which the learning rate rises to its peak."""
    lr_scaling: Scaling = "none"
    """Scaling of the learning rate with batches larger than `reference_batch_size`. It adds a warm-up of 5 %."""
    reference_batch_size: int | None = None
    """Batch size that `learning_rate` was tuned for. None: the recipe's own."""
    epochs: int | None = None
    """Passes over the training examples. It is converted to run.total_samples. None: run.total_samples."""
    eval_every_epochs: int | None = None
    """Passes over the training examples between evaluations. It is converted to run.eval_every. None: run.eval_every.
    """
    batch_size: int = 512
    """Examples per update, over all processes. The last batch of an epoch may be smaller."""
    weight_decay: float = 1e-2
    """Weight decay of AdamW; biases, norms and embeddings are excluded."""
    max_grad_norm: float = 1.0
    """Maximum norm of the gradient of the whole batch."""
    grad_accum_steps: int = 1
    """Micro-batches per batch. Lowers memory and changes nothing else."""
    num_workers: int = 0
    """Loader processes per process of the run. 0: load in a thread. Does not change results."""
    net: NetworkConfig = field(default_factory=MLPConfig)
    """Network architecture: MLPConfig, GraphConfig, or a config of your own with a method `build`."""
    changeable_on_resume: ClassVar[tuple[str, ...]] = (
        *("learning_rate", "schedule", "plateau_patience", "warmup_fraction", "lr_scaling", "weight_decay"),
        *("max_grad_norm", "grad_accum_steps", "num_workers", "epochs", "eval_every_epochs"),
    )

    def validate(self, task: Any, run: RunConfig) -> None:
        """Raise ConfigError for invalid settings, before any process starts."""
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}.", "Use at least one example per update.")
        for name in ("epochs", "eval_every_epochs"):
            if (passes := getattr(self, name)) is not None and passes < 1:
                raise ConfigError(f"{name} is {passes}.", "Use at least one pass over the training examples.")
        if self.num_workers < 0:
            raise ConfigError(f"num_workers is {self.num_workers}.", "Use 0 for a thread, or a number of processes.")
        if self.learning_rate <= 0.0:
            raise ConfigError(f"learning_rate is {self.learning_rate}.", "Use a number above 0, such as 1e-3.")
        if not 0.0 <= self.warmup_fraction < 1.0:
            raise ConfigError(
                f"warmup_fraction is {self.warmup_fraction}, which is not a fraction of the run from 0 to below 1.",
                "Use 0.05, or 0 for no warm-up.",
            )
        if self.schedule == "plateau" and (self.plateau_patience < 1 or not run.eval_every):
            raise ConfigError(
                f"the plateau schedule needs evaluations, but plateau_patience is {self.plateau_patience} and "
                f"eval_every is {run.eval_every}.",
                "Set both to at least 1, or use --algo.schedule cosine.",
            )
        self.net.validate()

    def check_task(self, task: Any) -> None:
        """Check the settings against the data set when a new run has built it."""
        if not isinstance(task, Dataset):
            raise ConfigError(
                f"supervised learning needs a data set, but {type(task).__name__} is none.", "Inherit lockstep.Dataset."
            )
        if task.target_type not in get_args(TargetType):
            raise ConfigError(
                f"target_type of {type(task).__name__} is {task.target_type!r}.",
                "Use 'regression' for numbers, 'binary' for labels 0 and 1, or 'multiclass' for class numbers.",
            )


class Supervised(Algorithm):
    """A network trained on examples."""

    Config = SupervisedConfig
    config: SupervisedConfig
    task: Dataset

    def setup(self) -> None:
        config, task, runtime = self.config, self.task, self.runtime
        self.samples = min(config.batch_size, task.count("train"))
        self.loader = DataLoader(task, config.batch_size, runtime.lanes, config.num_workers)
        self.net = config.net.build(task).to(runtime.device)
        self._draws_random = check_network(self.net, task, runtime.device)
        self._dropout_stream = runtime.lanes.shared_stream("supervised.dropout")
        groups = _param_groups(self.net, config.weight_decay)
        adam = FusedAdam(groups, lr=config.learning_rate, decoupled_weight_decay=True)
        self.optimizer = DistributedOptimizer(
            runtime,
            adam,
            max_grad_norm=config.max_grad_norm,
            accumulate=config.grad_accum_steps,
            not_compiled="batches of examples vary in shape",
        )
        self.halvings = self.register_state("halvings", torch.zeros((), dtype=torch.int64))
        """Number of times that the plateau schedule halved the learning rate."""
        self.evaluations = self.register_state("evaluations", torch.zeros((), dtype=torch.int64))
        """Number of evaluations that the plateau schedule has used."""
        self.batch: dict[str, Any] = {}
        self._upload = Uploader(runtime.device)
        # On a device the host indexes nodes and edges before the upload: indexing there would synchronize.
        self._index_on_host = (
            hasattr(self.net, "locate")
            and runtime.device.type != "cpu"
            and not runtime.exact
            and config.grad_accum_steps == 1
        )
        self._index: Any = None
        """Indices of the nodes and edges of the current batch; None if the network computes them."""

    def collect(self, clock: TrainState) -> Metrics:
        """Take the next batch. The loader reads ahead, so this waits only if loading is slower than training."""
        # Next batch
        with self.runtime.phase("load"):
            batch, self.samples = self.loader.batch(clock.samples)
            if self._draws_random:
                batch |= {"position": self._positions(clock.samples, len(batch["weight"]))}
            index = self.net.locate(batch["inputs"]) if self._index_on_host else {}  # type: ignore[operator]
        # Upload to the device
        uploaded = self._upload({"batch": batch, "index": index})
        self.batch, self._index = uploaded["batch"], uploaded["index"] or None
        return Metrics()

    def update(self, clock: TrainState) -> Metrics:
        """Take one optimizer step on the current batch."""
        epoch, position = divmod(clock.samples, self.loader.count)
        where = f"epoch {epoch + 1}, example {position:,}"
        # AdamW step
        metrics = self.optimizer.step(self.loss, self.batch, self._learning_rate(clock), where)
        self._index = None  # later losses may be of a part of the batch
        self.optimizer.check_last_step()
        return metrics

    def _learning_rate(self, clock: TrainState) -> float:
        """Return the learning rate of the next update."""
        config = self.config
        # Scaling with the batch size, and warm-up
        factor = lr_scale(config.lr_scaling, config.batch_size, config.reference_batch_size)
        warmup = config.warmup_fraction or (0.05 if factor > 1.0 else 0.0)
        progress = clock.progress
        if progress < warmup:  # use the progress after this update, so that the first rate is not zero
            progress = min(warmup, (clock.samples + self.samples) / clock.total_samples)
        peak = config.learning_rate * factor
        if config.schedule != "plateau":
            return schedule(config.schedule, peak, progress, warmup)
        # Plateau: process each evaluation once
        if clock.evaluations > self.evaluations:
            self.evaluations.fill_(clock.evaluations)
            self.halvings += clock.evals_since_best > 0 and clock.evals_since_best % config.plateau_patience == 0
        return schedule("constant", peak, progress, warmup) * 0.5 ** int(self.halvings)

    def loss(self, batch: dict[str, Any]) -> Loss:
        """Return the data set's loss as a sum over examples. Padding of a lane has weight 0."""
        inputs = self.task.network_input(batch["inputs"])
        with self._seeded(batch):
            outputs = self.net(inputs) if self._index is None else self.net(inputs, self._index)
        result = self.task.loss(outputs.float(), batch["target"], batch["weight"])
        return result._replace(metric_sums={"example_loss": result.loss_sum.detach(), **result.metric_sums})

    def _positions(self, samples: int, rows: int) -> Tensor:
        """Return the number of each local row of a batch in the run, [L x M]. Padding is counted, too."""
        lanes = self.runtime.lanes
        within_lane = torch.arange(rows // len(lanes)) * lanes.num_lanes  # [M]
        return samples + (within_lane + torch.tensor(lanes.local)[:, None]).reshape(-1)

    @contextmanager
    def _seeded(self, batch: dict[str, Any]) -> Iterator[None]:
        """Seed torch for a network with dropout by the position of a batch in the run. Restore its state afterwards.

        With exact reduction a batch is that of one lane, so the draws do not depend on the number of processes.
        """
        if not self._draws_random:
            yield
            return
        with seeded_torch(self._dropout_stream.draw_seed(int(batch["position"][0])), self.runtime.device):
            yield

    def benchmark_ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        """Return forward, backward and optimizer step on the last batch, without the code around them."""
        net = copy.deepcopy(self.net)
        adam = FusedAdam(net.parameters(), weight_decay=1e-2, decoupled_weight_decay=True)
        rows = max(1, len(self.batch["weight"]) // fewer)
        inputs = tree_map(lambda x: x[:rows].clone(), self.batch["inputs"])

        def learn() -> None:
            with self.runtime.autocast():
                predictions = net(self.task.network_input(inputs))
            adam.zero_grad()
            predictions.sum().backward()
            adam.step()

        return [BenchmarkOp("learning", rows, 1, learn, fewer)]

    def sample_buffers(self) -> Tree:
        return self.batch

    def policy(self) -> "Predictor":
        return Predictor(self.net, self.task)


class Predictor(Policy):
    """Predictions of the network: numbers in the unit of the target, log-odds of the label 1, or logits of classes."""

    def __init__(self, net: nn.Module, task: Dataset) -> None:
        self.net, self.task, self.ragged = net, task, task.ragged

    @torch.no_grad()
    def forward(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        inputs, training = self.task.network_input(obs), self.net.training
        if training:
            self.net.eval()  # without dropout
        outputs = self.net(inputs).float()
        if training:
            self.net.train()
        return self.task.predictions(outputs), outputs, memory


def _param_groups(net: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Split parameters into those with weight decay (matrices of layers) and those without."""
    embedded = {p for module in net.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    matrices = [(name, p) for name, p in net.named_parameters() if p.dim() > 1 and p not in embedded]
    others = [(name, p) for name, p in net.named_parameters() if p.dim() <= 1 or p in embedded]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
