"""The house rules: laws over the source of the package that no linter can say.

A law is a function from one module's source to what breaks it. Every law is tried on planted faults first, because a
law that finds nothing may only be blind.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "lockstep"


class Use(NamedTuple):
    """A name from elsewhere, in full (`torch.distributed.all_reduce`), where it is used."""

    line: int
    name: str
    call: ast.Call | None
    """The call, when the name is being called."""


class Breach(NamedTuple):
    line: int
    words: str


@dataclass(frozen=True)
class Module:
    """The source of one module; `path` is inside the package, such as `nn/initialization.py`."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What each imported name stands for, wherever in the module it was imported."""
        known = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    known[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return known

    def resolve(self, node: ast.AST) -> str | None:
        """The full name an expression stands for, also through `getattr` and `import_module` with plain text."""
        match node:
            case ast.Name(id=name):
                return self.aliases.get(name)
            case ast.Attribute(value=value, attr=name):
                base = self.resolve(value)
                return f"{base}.{name}" if base else None
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
                base = self.resolve(value)
                return f"{base}.{name}" if base else None
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                return name
        return None

    @cached_property
    def uses(self) -> list[Use]:
        """Every imported name and every use of one, the longest form of each."""
        nodes = list(ast.walk(self.tree))
        inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        calls = {id(node.func): node for node in nodes if isinstance(node, ast.Call)}
        found = []
        for node in nodes:
            if isinstance(node, ast.Import):
                found += [Use(node.lineno, alias.name, None) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [Use(node.lineno, f"{node.module}.{alias.name}", None) for alias in node.names]
            elif id(node) not in inner and (name := self.resolve(node)):
                found.append(Use(node.lineno, name, calls.get(id(node))))
        return found

    def builtins(self, *names: str) -> Iterator[Breach]:
        """Uses of bare builtins, where the module has not imported something else under that name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and node.id in names and node.id not in self.aliases:
                yield Breach(node.lineno, f"{node.id}()")

    def within(self, *folders: str) -> bool:
        return any(self.path.startswith(f"{folder}/") for folder in folders)


def under(name: str, *roots: str) -> bool:
    """Whether a full name is one of the roots or lies inside one: `torch.distributions` is not `torch.dist`."""
    return any(name == root or name.startswith(f"{root}.") for root in roots)


def has_keyword(call: ast.Call | None, name: str | None) -> bool:
    """Whether a call passes something other than None by this keyword; the keyword None is `**`."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == name] if call else []
    return bool(given) and not (isinstance(given[0], ast.Constant) and given[0].value is None)


# --------------------------------------------------------------------------------------------------------- the laws


RUNTIME = ("distributed", "launch", "tools/audit")
NOT_RUNTIME = ("launch/process_lifetime.py", "tools/audit/analysis.py")
"""Modules in the folders of the runtime that keep its laws like any other."""


def is_runtime(module: Module) -> bool:
    return module.within(*RUNTIME) and module.path not in NOT_RUNTIME


def only_the_runtime_talks_to_other_processes(module: Module) -> Iterator[Breach]:
    roots = ("torch.distributed", "torch._C._distributed_c10d", "torch.nn.parallel", "torch.utils.data.distributed")
    if not is_runtime(module):
        yield from (Breach(use.line, use.name) for use in module.uses if under(use.name, *roots))


def only_the_runtime_asks_which_process_it_is(module: Module) -> Iterator[Breach]:
    variables = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}
    if is_runtime(module):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in variables:
            yield Breach(node.lineno, f"the environment variable {node.value}")


def algorithms_and_tasks_do_not_know_their_process(module: Module) -> Iterator[Breach]:
    if not module.within("algorithms", "tasks", "nn", "data", "recipes"):
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ("rank", "local_rank", "world_size"):
            yield Breach(node.lineno, f".{node.attr}")


def algorithms_touch_no_files_logs_or_environment(module: Module) -> Iterator[Breach]:
    if module.within("algorithms"):
        roots = ("os.environ", "os.getenv", "os.putenv", "logging", "pathlib", "shutil", "tempfile")
        yield from (Breach(use.line, use.name) for use in module.uses if under(use.name, *roots))
        yield from module.builtins("open")


PICKLES = (
    *("pickle", "_pickle", "pickle5", "cloudpickle", "dill", "jsonpickle", "shelve", "marshal", "joblib"),
    *("multiprocessing.connection", "multiprocessing.managers"),
    *("torch.load", "torch.jit.load", "torch.hub", "torch.package", "torch.serialization"),
    *("torch.distributed.checkpoint", "torch.distributed.rpc"),
    "pandas.read_pickle",
)
TENSORS_ALONE = "tools/export/load_state_dict.py"
"""Models of other programs come as torch saved them: one module may ask torch for the tensors in them, and no more."""
YAML = {"safe_load", "safe_load_all", "safe_dump", "safe_dump_all", "dump", "YAMLError", "SafeLoader", "SafeDumper"}
OBJECT_COLLECTIVE = re.compile(r"(all_gather|gather|broadcast|scatter|send|recv)_object(_list)?")


def nothing_can_unpickle(module: Module) -> Iterator[Breach]:
    for use in module.uses:
        root, _, rest = use.name.partition(".")
        unsafe_yaml = root == "yaml" and rest and rest.partition(".")[0] not in YAML
        if use.name == "torch.load" and module.path == TENSORS_ALONE and only_weights(use.call):
            continue
        if under(use.name, *PICKLES) or unsafe_yaml:
            yield Breach(use.line, use.name)
        elif use.name == "numpy.load" and use.call and (len(use.call.args) > 2 or has_keyword(use.call, None)):
            yield Breach(use.line, "numpy.load with arguments that may allow pickle")
    for node in ast.walk(module.tree):
        names = [node.attr] if isinstance(node, ast.Attribute) else [node.id] if isinstance(node, ast.Name) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        yield from (Breach(node.lineno, name) for name in names if OBJECT_COLLECTIVE.fullmatch(name))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and not is_false(node.value):
            yield Breach(node.value.lineno, "allow_pickle")


def only_weights(call: ast.Call | None) -> bool:
    """Whether a call of torch.load says, in so many words, that it reads tensors alone."""
    given = [keyword.value for keyword in call.keywords if keyword.arg == "weights_only"] if call else []
    return len(given) == 1 and isinstance(given[0], ast.Constant) and given[0].value is True


def is_false(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def nothing_runs_text_as_code(module: Module) -> Iterator[Breach]:
    yield from module.builtins("eval", "exec", "__import__")
    yield from (Breach(use.line, use.name) for use in module.uses if under(use.name, "builtins"))


TORCH_DRAWS = re.compile(
    r"torch\.(rand\w*|bernoulli|multinomial|normal|poisson|seed|initial_seed|manual_seed|[gs]et_rng_state|random(\..*)?"
    r"|(cuda|mps|xpu)\.(seed|manual_seed|[gs]et_rng_state)\w*"
    r"|nn\.(functional\.)?(\w*[dD]ropout\w*|gumbel_softmax|rrelu|RReLU))"
)
TENSOR_DRAWS = {
    *("uniform_", "normal_", "log_normal_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_"),
    *("multinomial", "rsample"),
}
NUMPY_GENERATORS = ("Generator", "BitGenerator", "SeedSequence", "Philox", "PCG64", "PCG64DXSM", "SFC64", "default_rng")
FORKED_SCOPE = "nn/initialization.py"
RANDOM_ALLOWED = {
    # Torch's own layers draw when they are made, so one module may seed it, and only inside `fork_rng`.
    FORKED_SCOPE: {"torch.random.fork_rng", "torch.manual_seed"},
    # The checker of tasks looks whether a task has moved the global generators.
    "tasks/env_checker.py": {
        "random.getstate",
        "numpy.random.get_state",
        "torch.get_rng_state",
        "torch.random.get_rng_state",
    },
    # An audit looks whether the global generators of somebody else's script stand at the same place on every process.
    "launch/fork_server.py": {"numpy.random.seed"},  # a fork must not share what a fresh process would not
    "tools/audit/recorder.py": {"random.getstate", "numpy.random.get_state", "torch.get_rng_state"},
}


def nothing_reads_global_random_state(module: Module) -> Iterator[Breach]:
    forked = forked_lines(module)
    for use in module.uses:
        allowed = use.name in RANDOM_ALLOWED.get(module.path, ())
        if use.name == "torch.manual_seed":
            allowed = allowed and use.line in forked
        if draws_from_global_state(use) and not allowed:
            yield Breach(use.line, use.name)
    # Methods of tensors and distributions, which draw from torch's global generator unless given one.
    methods = TENSOR_DRAWS | (
        {"sample"} if any(under(use.name, "torch.distributions") for use in module.uses) else set()
    )
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in methods:
            name = module.resolve(node.func) or ""
            if not under(name, "torch.nn.init") and not has_keyword(node, "generator"):
                yield Breach(node.lineno, f".{node.func.attr}()")


def draws_from_global_state(use: Use) -> bool:
    """Whether a name is a function of global random state, or makes a generator that nobody seeded."""
    seeded = use.call is None or bool(use.call.args or use.call.keywords)
    if under(use.name, "torch"):
        return bool(TORCH_DRAWS.fullmatch(use.name)) and not has_keyword(use.call, "generator")
    if under(use.name, "numpy.random") and use.name != "numpy.random":
        return use.name.split(".")[2] not in NUMPY_GENERATORS or not seeded
    return use.name.startswith("random.") and not (use.name == "random.Random" and seeded)


def forked_lines(module: Module) -> set[int]:
    """The lines inside a `with torch.random.fork_rng(...)`."""
    lines: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.With):
            calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
            if any(module.resolve(call.func) == "torch.random.fork_rng" for call in calls):
                lines |= set(range(node.body[0].lineno, (node.end_lineno or 0) + 1))
    return lines


def nothing_prints(module: Module) -> Iterator[Breach]:
    yield from module.builtins("print")


PRINTING = {
    "io/printable.py": {"sys.stdout.write", "sys.stderr.write"},
    "io/rich_console.py": {"rich.console.Console"},
    "tasks/gym/worker_pool.py": {"sys.stderr.write"},  # what a user's own environment writes is passed on as it is
}


def terminal_output_is_made_printable(module: Module) -> Iterator[Breach]:
    """Text may quote foreign files: it goes through io.printable.write_text or io.rich_console.PrintableConsole."""
    for use in module.uses:
        raw = under(use.name, "rich.console.Console", "rich.print", "rich.get_console") or re.fullmatch(
            r"sys\.(__)?std(out|err)(__)?\.(write|writelines|buffer.*)", use.name
        )
        if raw and use.name not in PRINTING.get(module.path, ()):
            yield Breach(use.line, use.name)


def files_stay_small(module: Module) -> Iterator[Breach]:
    lines = len(module.text.splitlines())
    if lines > 400:
        yield Breach(400, f"{lines} lines: it wants to be two files")


def recipes_stay_small(module: Module) -> Iterator[Breach]:
    for node in module.tree.body:
        if module.within("recipes") and isinstance(node, ast.ClassDef):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > 60:
                yield Breach(node.lineno, f"the recipe {node.name} has {lines} lines, more than 60")


def modules_and_names_say_their_job(module: Module) -> Iterator[Breach]:
    if not ast.get_docstring(module.tree):
        yield Breach(1, "no sentence at the top that says its job")
    if {"utils", "util", "helpers", "helper", "common", "misc"} & set(re.split(r"[/.]", module.path)):
        yield Breach(1, "a name that does not say what is in it")
    for node in ast.walk(module.tree):
        # CheckpointManager is the field's word for what saves and restores checkpoints.
        vague = r"Base[A-Z]\w*|(?!CheckpointManager$)\w+Manager"
        if isinstance(node, ast.ClassDef) and re.fullmatch(vague, node.name):
            yield Breach(node.lineno, f"the name {node.name}")


Law = Callable[[Module], Iterator[Breach]]
LAWS: list[Law] = [
    only_the_runtime_talks_to_other_processes,
    only_the_runtime_asks_which_process_it_is,
    algorithms_and_tasks_do_not_know_their_process,
    algorithms_touch_no_files_logs_or_environment,
    nothing_can_unpickle,
    nothing_runs_text_as_code,
    nothing_reads_global_random_state,
    nothing_prints,
    terminal_output_is_made_printable,
    files_stay_small,
    recipes_stay_small,
    modules_and_names_say_their_job,
]


@cache
def house() -> list[Module]:
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 5, f"{PACKAGE} is not the package"
    return [Module(file.relative_to(PACKAGE).as_posix(), file.read_text()) for file in files]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_package_keeps(law: Law):
    breaches = [f"src/lockstep/{module.path}:{line}: {words}" for module in house() for line, words in law(module)]
    assert not breaches, f"{law.__name__} is broken:\n" + "\n".join(breaches)


# --------------------------------------------------------------------------------------------------- planted faults

FAULTS: list[tuple[Law, str, str]] = [
    (only_the_runtime_talks_to_other_processes, "train.py", "import torch.distributed as dist"),
    (only_the_runtime_talks_to_other_processes, "loggers/run_logger.py", "from torch import distributed"),
    (only_the_runtime_talks_to_other_processes, "loggers/run_logger.py", "from torch.distributed import barrier"),
    (only_the_runtime_talks_to_other_processes, "nn/mlp.py", "import torch\ntorch.distributed.barrier()"),
    (only_the_runtime_talks_to_other_processes, "nn/mlp.py", "import torch as t\ngetattr(t, 'distributed')"),
    (
        only_the_runtime_talks_to_other_processes,
        "a.py",
        "import importlib\nimportlib.import_module('torch.distributed')",
    ),
    (only_the_runtime_talks_to_other_processes, "launch.py", "import torch.distributed"),
    (only_the_runtime_talks_to_other_processes, "tools/play/playback.py", "import torch.distributed"),
    *((only_the_runtime_talks_to_other_processes, path, "import torch.distributed") for path in NOT_RUNTIME),
    *((only_the_runtime_asks_which_process_it_is, path, "rank = 'RANK'") for path in NOT_RUNTIME),
    (only_the_runtime_talks_to_other_processes, "a.py", "from torch.nn.parallel import DistributedDataParallel"),
    (only_the_runtime_asks_which_process_it_is, "loggers/run_logger.py", "import os\nos.environ['RANK']"),
    (only_the_runtime_asks_which_process_it_is, "cli/train.py", "from os import getenv\ngetenv('WORLD_SIZE', '1')"),
    (only_the_runtime_asks_which_process_it_is, "train.py", "import os\nx = 'LOCAL_RANK' in os.environ"),
    (algorithms_and_tasks_do_not_know_their_process, "algorithms/ppo.py", "def f(runtime): return runtime.rank == 0"),
    (algorithms_and_tasks_do_not_know_their_process, "tasks/snake/env.py", "seed = lanes.seed + lanes.rank"),
    (algorithms_touch_no_files_logs_or_environment, "algorithms/ppo.py", "import os\nos.environ.get('DEBUG')"),
    (algorithms_touch_no_files_logs_or_environment, "algorithms/ppo.py", "open('log.txt', 'w')"),
    (algorithms_touch_no_files_logs_or_environment, "algorithms/ppo.py", "from logging import getLogger"),
    (nothing_can_unpickle, "checkpoint/a.py", "import pickle"),
    (nothing_can_unpickle, "checkpoint/a.py", "def f():\n    from cloudpickle import loads"),
    (nothing_can_unpickle, "checkpoint/a.py", "import dill as safe"),
    (nothing_can_unpickle, "checkpoint/a.py", "import shelve"),
    (nothing_can_unpickle, "checkpoint/a.py", "import marshal"),
    (nothing_can_unpickle, "checkpoint/a.py", "from joblib import load"),
    (nothing_can_unpickle, "checkpoint/a.py", "import importlib\nimportlib.import_module('pickle')"),
    (nothing_can_unpickle, "checkpoint/a.py", "import torch\ntorch.load('x.pt', weights_only=True)"),
    (nothing_can_unpickle, "checkpoint/a.py", "from torch import load as read\nread('x.pt')"),
    (nothing_can_unpickle, TENSORS_ALONE, "import torch\ntorch.load('x.pt')"),
    (nothing_can_unpickle, TENSORS_ALONE, "import torch\ntorch.load('x.pt', weights_only=trusted)"),
    (nothing_can_unpickle, TENSORS_ALONE, "import torch\nread = torch.load"),
    (nothing_can_unpickle, "checkpoint/a.py", "import torch\ngetattr(torch, 'load')('x.pt')"),
    (nothing_can_unpickle, "checkpoint/a.py", "import torch.distributed.checkpoint as dcp"),
    (nothing_can_unpickle, "checkpoint/a.py", "import numpy as np\nnp.load('x.npy', allow_pickle=True)"),
    (nothing_can_unpickle, "checkpoint/a.py", "import numpy as np\nnp.load('x.npy', allow_pickle=trusted)"),
    (nothing_can_unpickle, "checkpoint/a.py", "import numpy as np\nnp.load('x.npy', None, True)"),
    (nothing_can_unpickle, "checkpoint/a.py", "import numpy as np\nnp.load('x.npy', **options)"),
    (nothing_can_unpickle, "checkpoint/a.py", "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)"),
    (nothing_can_unpickle, "checkpoint/a.py", "from yaml import unsafe_load"),
    (nothing_can_unpickle, "checkpoint/a.py", "import yaml\nyaml.full_load(text)"),
    (nothing_can_unpickle, "distributed/a.py", "import torch.distributed as dist\ndist.all_gather_object(out, x)"),
    (nothing_can_unpickle, "distributed/a.py", "from torch.distributed import broadcast_object_list"),
    (nothing_can_unpickle, "distributed/a.py", "self.group.send_object_list([x])"),
    (nothing_runs_text_as_code, "cli/a.py", "eval('1 + 1')"),
    (nothing_runs_text_as_code, "cli/a.py", "run = exec"),
    (nothing_runs_text_as_code, "cli/a.py", "__import__('pickle')"),
    (nothing_runs_text_as_code, "cli/a.py", "import builtins\nbuiltins.eval('1')"),
    (nothing_reads_global_random_state, "nn/a.py", "import torch\ntorch.manual_seed(0)"),
    (nothing_reads_global_random_state, FORKED_SCOPE, "import torch\ntorch.manual_seed(0)"),
    (nothing_reads_global_random_state, FORKED_SCOPE, "import torch\nwith torch.no_grad():\n    torch.manual_seed(0)"),
    (nothing_reads_global_random_state, FORKED_SCOPE, "import torch\nwith torch.random.fork_rng():\n    torch.rand(3)"),
    (nothing_reads_global_random_state, "nn/a.py", "import torch\ntorch.rand_like(x)"),
    (nothing_reads_global_random_state, "data/a.py", "from torch import randperm\nrandperm(8, generator=None)"),
    (nothing_reads_global_random_state, "nn/a.py", "from torch import nn\nnn.Dropout(0.1)"),
    (nothing_reads_global_random_state, "nn/a.py", "import torch.nn.functional as F\nF.gumbel_softmax(x)"),
    (nothing_reads_global_random_state, "nn/a.py", "x.normal_()"),
    (nothing_reads_global_random_state, "nn/a.py", "action = probabilities.multinomial(1)"),
    (nothing_reads_global_random_state, "nn/a.py", "from torch.distributions import Normal\nNormal(m, s).sample()"),
    (nothing_reads_global_random_state, "tasks/a.py", "import numpy as np\nnp.random.seed(0)"),
    (nothing_reads_global_random_state, "tasks/a.py", "from numpy.random import randint"),
    (nothing_reads_global_random_state, "tasks/a.py", "import numpy as np\nnp.random.default_rng()"),
    (nothing_reads_global_random_state, "tasks/a.py", "import random\nrandom.shuffle(x)"),
    (nothing_reads_global_random_state, "tasks/env_checker.py", "import random\nrandom.random()"),
    (nothing_reads_global_random_state, "tasks/a.py", "from random import choice"),
    (nothing_reads_global_random_state, "tasks/a.py", "import random\nrandom.Random().random()"),
    (nothing_prints, "cli/a.py", "print('hello')"),
    (terminal_output_is_made_printable, "cli/a.py", "import sys\nsys.stdout.write(name)"),
    (terminal_output_is_made_printable, "cli/a.py", "import sys\nsys.stderr.buffer.write(name)"),
    (terminal_output_is_made_printable, "cli/a.py", "from rich.console import Console"),
    (terminal_output_is_made_printable, "checkpoint/a.py", "import rich\nrich.print(name)"),
    (files_stay_small, "a.py", "x = 1\n" * 401),
    (recipes_stay_small, "recipes/a.py", "class Snake:\n" + "    x = 1\n" * 60),
    (modules_and_names_say_their_job, "a.py", "x = 1"),
    (modules_and_names_say_their_job, "nn/utils.py", '"""Things."""'),
    (modules_and_names_say_their_job, "a.py", '"""Runs."""\nclass RunManager: ...'),
    (modules_and_names_say_their_job, "a.py", '"""Tasks."""\nclass BaseTask: ...'),
]

INNOCENT: list[tuple[str, str]] = [
    ("cli/a.py", '"""A."""\nimport sys\nfrom rich.console import Group\nwrite_text(sys.stdout, name)'),
    (
        "distributed/a.py",
        '"""A."""\nimport os\nimport torch.distributed as dist\ndist.all_reduce(x)\nos.environ["RANK"]',
    ),
    (
        "nn/a.py",
        '"""A."""\nfrom torch import nn\nfrom torch.distributions import Normal\nnn.init.normal_(x)\nNormal(m, s)',
    ),
    ("nn/a.py", '"""A."""\nimport torch\ntorch.randperm(8, generator=generator)\nmodel.eval()\ntorch.compile(model)'),
    (FORKED_SCOPE, '"""A."""\nimport torch\nwith torch.random.fork_rng(devices=[]):\n    torch.manual_seed(seed)'),
    ("tasks/env_checker.py", '"""A."""\nimport random\nimport torch\nx = random.getstate(), torch.get_rng_state()'),
    ("rng.py", '"""A."""\nimport numpy as np\nnp.random.Generator(np.random.Philox(key=key)).random(3)'),
    ("tasks/a.py", '"""A."""\nimport numpy as np\nnp.random.default_rng(seed)\nnp.load("x.npy", allow_pickle=False)'),
    (
        "checkpoint/a.py",
        '"""A."""\nimport yaml\nyaml.safe_load(text)\nconsole.print("hello")\nopen("x")\nrandom.choice(x)',
    ),
    ("cli/a.py", '"""A."""\nfrom lockstep.cli import eval\neval.main()'),
    (TENSORS_ALONE, '"""A."""\nimport torch\ntorch.load("x.pt", weights_only=True)'),
]


@pytest.mark.parametrize(("law", "path", "source"), FAULTS)
def test_a_planted_fault_is_caught(law: Law, path: str, source: str):
    assert list(law(Module(path, source)))


@pytest.mark.parametrize(("path", "source"), INNOCENT)
def test_honest_code_is_left_alone(path: str, source: str):
    assert [breach for law in LAWS for breach in law(Module(path, source))] == []


def test_every_law_has_been_tried():
    assert {law for law, _, _ in FAULTS} == set(LAWS)


def test_no_two_test_files_share_a_name():
    """pytest imports them by it, and would not collect the second."""
    names = [path.name for path in Path(__file__).parents[1].glob("*/test_*.py")]
    assert sorted(names) == sorted(set(names))
