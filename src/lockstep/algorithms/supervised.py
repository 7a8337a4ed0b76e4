"""Supervised learning: an iteration takes the next batch of a data set and makes one update of it.

Shapes: L local lanes, M examples a lane; a batch is [L x M, ...], lane after lane.
"""

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from lockstep.clock import TrainState
from lockstep.config import ConfigError, RunConfig
from lockstep.data.dataloader import DataLoader
from lockstep.distributed import DistributedOptimizer, FusedAdam, Runtime
from lockstep.metrics import Metrics
from lockstep.nn.gnn import GraphConfig, GraphNet
from lockstep.nn.initialization import seeded_init
from lockstep.ops.functional import Scaling, lr_scale, schedule
from lockstep.protocols import BenchmarkOp, Dataset, Loss, StateDict
from lockstep.pytree import Tree, load_into, tree_map
from lockstep.transfer import Uploader


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig:
    """Settings of supervised learning. Every number is for the whole run, not for one process."""

    learning_rate: float = 1e-3
    """Peak learning rate; `schedule` shapes it over the run."""
    schedule: Literal["constant", "linear", "cosine", "plateau"] = "cosine"
    """How the learning rate goes from its peak; plateau halves it when evaluations stop getting better."""
    plateau_patience: int = 3
    """Evaluations without a better one after which plateau halves the learning rate, and after as many again."""
    warmup_fraction: float = 0.05
    """Part of the run over which the learning rate rises to its peak."""
    lr_scaling: Scaling = "none"
    """Scaling of the learning rate with batches larger than `reference_batch_size`. It adds a warm-up of 5 %."""
    reference_batch_size: int | None = None
    """Batch size that `learning_rate` is meant for; none takes the recipe's own."""
    batch_size: int = 512
    """Examples of one update, over all processes; the last batch of an epoch has what is left."""
    weight_decay: float = 1e-2
    """AdamW's decay of weights; biases, norms and embeddings are left alone."""
    max_grad_norm: float = 1.0
    """The gradient of the whole batch is clipped to this norm."""
    grad_accum_steps: int = 1
    """Micro-batches a batch is cut into; lowers memory, changes nothing else."""
    num_workers: int = 0
    """Processes that read batches ahead, for each process of the run; 0 reads in a thread. Changes no bit."""
    net: GraphConfig = field(default_factory=GraphConfig)
    """Shape of the network."""

    def validate(self, task: Any, run: RunConfig) -> None:
        """Refuse impossible numbers, in words, before any process starts."""
        if self.batch_size < 1:
            raise ConfigError(f"batch_size is {self.batch_size}.", "An update needs at least one example.")
        if self.num_workers < 0:
            raise ConfigError(f"num_workers is {self.num_workers}.", "Use 0 for a thread, or a number of processes.")
        if self.learning_rate <= 0.0:
            raise ConfigError(f"learning_rate is {self.learning_rate}.", "Use a number above 0, such as 1e-3.")
        if not 0.0 <= self.warmup_fraction < 1.0:
            raise ConfigError(
                f"warmup_fraction is {self.warmup_fraction}, which is no part of a run.", "Use 0.05, or 0 for none."
            )
        if self.schedule == "plateau" and (self.plateau_patience < 1 or not run.eval_every):
            raise ConfigError(
                f"a plateau is looked for in evaluations, with plateau_patience {self.plateau_patience} and "
                f"eval_every {run.eval_every}.",
                "Set both to at least 1, or use --algo.schedule cosine.",
            )
        self.net.validate()

    def samples_per_iteration(self, task: Any) -> int:
        """Of an iteration that is not the last of its epoch."""
        return self.batch_size

    def build(self, task: Dataset, runtime: Runtime) -> "Supervised":
        return Supervised(self, task, runtime)


class Supervised:
    """One network learning from examples."""

    def __init__(self, config: SupervisedConfig, task: Dataset, runtime: Runtime) -> None:
        self.config, self.task, self.runtime = config, task, runtime
        self.samples = min(config.batch_size, task.count("train"))
        self.loader = DataLoader(task, config.batch_size, runtime.lanes, config.num_workers)
        example = task.read("train", np.zeros(1, dtype=np.int64))["inputs"]
        with seeded_init(runtime.lanes.shared_stream("supervised.init")):
            self.net = GraphNet(example, task.vocabularies, config.net).to(runtime.device)
        rate = FusedAdam(_groups(self.net, config.weight_decay), lr=config.learning_rate, decoupled_weight_decay=True)
        self.optimizer = DistributedOptimizer(
            runtime,
            rate,
            max_grad_norm=config.max_grad_norm,
            accumulate=config.grad_accum_steps,
            not_compiled="batches of examples vary in shape",
        )
        self.halvings, self.heard = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
        """How often plateau halved the learning rate, and how many evaluations it has heard of."""
        self.batch: dict[str, Any] = {}
        self._upload = Uploader(runtime.device)
        # On a device the host works out where nodes and edges are before it uploads them: there it would have to wait.
        self._locates = runtime.device.type != "cpu" and not runtime.exact and config.grad_accum_steps == 1
        self._index: Any = None
        """Where nodes and edges of the batch under way are; None where the network is to work it out."""

    @property
    def updates(self) -> int:
        return int(self.optimizer.updates)

    def collect(self, clock: TrainState) -> Metrics:
        """Take the batch that comes next; the loader has read it by now, unless it is too slow."""
        with self.runtime.phase("load"):
            batch, self.samples = self.loader.batch(clock.samples)
            index = self.net.locate(batch["inputs"]) if self._locates else {}
        uploaded = self._upload({"batch": batch, "index": index})
        self.batch, self._index = uploaded["batch"], uploaded["index"] or None
        return Metrics()

    def update(self, clock: TrainState) -> Metrics:
        """One step on the batch just taken."""
        epoch, position = divmod(clock.samples, self.loader.count)
        where = f"epoch {epoch + 1}, example {position:,}"
        metrics = self.optimizer.step(self.loss, self.batch, self._rate(clock), where)
        self._index = None  # from here on a loss may be of a part of the batch
        self.optimizer.check_last_step()
        return metrics

    def _rate(self, clock: TrainState) -> float:
        config = self.config
        factor = lr_scale(config.lr_scaling, config.batch_size, config.reference_batch_size)
        warmup = config.warmup_fraction or (0.05 if factor > 1.0 else 0.0)
        progress = clock.progress
        if progress < warmup:  # the first update of a warm-up is its first step, not one of size zero
            progress = min(warmup, (clock.samples + self.samples) / clock.total_samples)
        peak = config.learning_rate * factor
        if config.schedule != "plateau":
            return schedule(config.schedule, peak, progress, warmup)
        if clock.evaluations > self.heard:
            self.heard.fill_(clock.evaluations)
            self.halvings += clock.evals_since_best > 0 and clock.evals_since_best % config.plateau_patience == 0
        return schedule("constant", peak, progress, warmup) * 0.5 ** int(self.halvings)

    def loss(self, batch: dict[str, Any]) -> Loss:
        """The loss summed over examples; those that only fill a lane up weigh nothing."""
        prediction, weight = self.net(batch["inputs"], self._index).float(), batch["weight"]
        if self.task.target_type == "classification":
            each = nnf.binary_cross_entropy_with_logits(prediction, batch["target"], reduction="none")
        else:
            mean, deviation = self.task.target_mean_std
            each = (prediction - (batch["target"] - mean) / deviation).square()
        total = (each * weight).sum()
        return Loss(total, weight.sum(), {"example_loss": total.detach()})

    def benchmark_ops(self, fewer: int = 1) -> list[BenchmarkOp]:
        """The network's forward, backward and step on the last batch, with nothing around them."""
        net = copy.deepcopy(self.net)
        rate = FusedAdam(net.parameters(), weight_decay=1e-2, decoupled_weight_decay=True)
        rows = max(1, len(self.batch["weight"]) // fewer)
        inputs = tree_map(lambda x: x[:rows].clone(), self.batch["inputs"])

        def learn() -> None:
            with self.runtime.autocast():
                predictions = net(inputs)
            rate.zero_grad()
            predictions.sum().backward()
            rate.step()

        return [BenchmarkOp("learning", rows, 1, learn, fewer)]

    def sample_buffers(self) -> Tree:
        return self.batch

    # -- state ---------------------------------------------------------------------------------------------------------

    def policy(self) -> "Predictor":
        return Predictor(self.net, self.task.target_mean_std)

    def model_state_dict(self) -> StateDict:
        return {f"net.{name}": tensor for name, tensor in self.net.state_dict(keep_vars=True).items()}

    def shared_state(self) -> StateDict:
        return self.model_state_dict() | self.optimizer.state() | {"halvings": self.halvings, "heard": self.heard}

    def load_shared_state(self, state: StateDict) -> None:
        load_into(self.shared_state(), state, "the network")

    def lane_state(self, lane: int) -> StateDict:
        return {}  # the place in the data is a function of the clock

    def load_lane_state(self, lane: int, state: StateDict) -> None: ...


class Predictor:
    """A number for each example: what is predicted, or the log-odds of the label 1."""

    def __init__(self, net: nn.Module, scale: tuple[float, float]) -> None:
        self.net, self.scale = net, scale

    def initial_state(self, count: int) -> Tree:
        return {}

    def act(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tree]:
        prediction, _, after = self.forward(obs, memory)
        return prediction, after

    @torch.no_grad()
    def forward(self, obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        mean, deviation = self.scale
        outputs = self.net(obs).float()
        return outputs * deviation + mean, outputs, memory


def _groups(net: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Parameters that decay, which are the matrices of layers, and those that do not."""
    embedded = {p for module in net.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    matrices = [(name, p) for name, p in net.named_parameters() if p.dim() > 1 and p not in embedded]
    others = [(name, p) for name, p in net.named_parameters() if p.dim() <= 1 or p in embedded]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
