"""Write files of Stable-Baselines3 without SB3, and read them without unpickling anything but tensors.

Such a file is a zip. Its `data` is JSON, with base64 pickles for values that JSON cannot represent. The parameters of
the policy and its optimizer are saved by torch. A plain MLP becomes SB3's own network. For other networks (a CNN, a
Dict observation, a normalizer) the file names `tools/export/sb3_features.py`.
"""

import base64
import dataclasses
import io
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from lockstep.algorithms.ppo import PPO
from lockstep.base import Algorithm
from lockstep.config import ConfigError, Recipe
from lockstep.io.safe_read import UnreadableFileError, open_regular, parse_json
from lockstep.nn.encoders import MLP, EncoderConfig
from lockstep.pytree import Tree, tree_map
from lockstep.space_layout import policy_obs, split_mask
from lockstep.tools.export.formats import Decide, compare
from lockstep.tools.export.load_state_dict import entries, first_line, open_zip, read_torch
from lockstep.tools.export.pickle_writer import PickleGlobal, PickleReduce, pickled
from lockstep.tools.export.sb3_features import Features

_POLICIES = "stable_baselines3.common.policies"
_SPACES = "gymnasium.spaces"
_HEADS = {"policy_head": "action_net", "value_head": "value_net", "log_std": "log_std"}
DATA_BYTES = 16 * 2**20
"""Size limit of SB3's settings as JSON. 16 MiB take under 512 MiB of memory when parsed."""
_VERSION = "2.9.2"
"""Version of SB3 for which files are written."""


def write_sb3(path: Path, algorithm: Algorithm, recipe: Recipe) -> float:
    """Write a zip that `stable_baselines3.PPO.load` loads. Return the largest difference of outputs."""
    if not isinstance(algorithm, PPO):
        raise ConfigError(f"{recipe.name} is not PPO, but --to sb3 exports only PPO.", "Use --to onnx, or --to pt2.")
    if policy_obs(algorithm.task.observation_space) is not algorithm.task.observation_space:
        raise ConfigError(
            "this policy has observations for the critic only, but PPO of Stable-Baselines3 has none.", "Use --to onnx."
        )
    if algorithm.net.memories:
        raise ConfigError("this policy is recurrent, but PPO of Stable-Baselines3 is not.", "Use --to onnx.")
    if type(algorithm.config.encoder) is not EncoderConfig:
        raise ConfigError(f"{recipe.name} has a custom network, which SB3 cannot build.", "Use --to onnx.")
    if split_mask(algorithm.task.observation_space)[1] is not None:
        raise ConfigError("this policy has action masks, but PPO of Stable-Baselines3 has none.", "Use --to onnx.")
    if isinstance(algorithm.task.action_space, spaces.Dict | spaces.Tuple):
        raise ConfigError(
            f"actions are {algorithm.task.action_space}, which Stable-Baselines3 does not support.", "Use --to onnx."
        )
    parameters = _to_sb3(algorithm)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data", json.dumps(_data(algorithm), indent=1))
        file.writestr("policy.pth", _saved(parameters))
        file.writestr("policy.optimizer.pth", _saved(_fresh_optimizer(algorithm)))
        file.writestr("_stable_baselines3_version", _VERSION)
    return compare(algorithm.policy(), _sb3_forward(algorithm, read_sb3(path)[1]), recipe, tolerance=0.0)


def _sb3_forward(algorithm: PPO, parameters: dict[str, Tensor]) -> Decide:
    """Reproduce what SB3 computes from the parameters of a file: features, policy head, most likely action."""
    if _is_plain(algorithm):
        encoder: nn.Module = type(algorithm.net.encoder)(algorithm.task.observation_space, algorithm.config.encoder)
        state = {f"layers.{name}": x for name, x in _with_prefix(parameters, "mlp_extractor.policy_net.").items()}
    else:
        arguments = _policy_arguments(algorithm)["features_extractor_kwargs"]
        encoder = Features(algorithm.task.observation_space, **arguments)
        state = _with_prefix(parameters, "pi_features_extractor.")
    encoder.load_state_dict(state)
    weight, bias, log_std = (parameters.get(name) for name in ("action_net.weight", "action_net.bias", "log_std"))
    assert weight is not None

    @torch.no_grad()
    def decide(obs: Tree, memory: Tree) -> tuple[Tensor, Tensor, Tree]:
        outputs = nn.functional.linear(encoder(tree_map(lambda x: x.float(), obs)), weight, bias)
        if log_std is not None:
            outputs = torch.cat([outputs, log_std.expand_as(outputs)], dim=-1)
        return algorithm.actions.mode(outputs), outputs, memory

    return decide


def _with_prefix(parameters: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in parameters.items() if name.startswith(prefix)}


def _is_plain(algorithm: PPO) -> bool:
    """Return whether SB3 has the same network: separate MLPs for policy and value on unnormalized observations."""
    net = algorithm.net
    separate_mlps = net.critic_encoder is not None and isinstance(net.encoder, MLP) and net.encoder.scale == 1.0
    return separate_mlps and not algorithm.normalizer.moments


def _to_sb3(algorithm: PPO) -> dict[str, Tensor]:
    """Return Lockstep's weights under SB3's names."""
    state = {name: tensor.detach().cpu().clone() for name, tensor in algorithm.net.state_dict().items()}
    sb3_state: dict[str, Tensor] = {}
    for name, tensor in state.items():
        part, _, rest = name.partition(".")
        for prefix in _prefixes(part, _is_plain(algorithm), algorithm.net.critic_encoder is None):
            suffix = rest.removeprefix("layers.") if "mlp" in prefix else rest
            sb3_state[f"{prefix}.{suffix}" if suffix else prefix] = tensor
    if not _is_plain(algorithm):
        moments = list(algorithm.normalizer.frozen.values())
        for prefix in ("features_extractor", "pi_features_extractor", "vf_features_extractor"):
            for index, (mean, std) in enumerate(moments):
                sb3_state |= {f"{prefix}.mean{index}": mean, f"{prefix}.std{index}": std}
    return sb3_state


def _prefixes(part: str, is_plain: bool, shared: bool) -> list[str]:
    """Return SB3's names of a part of the network. An encoder shared by policy and value has three names."""
    if part in _HEADS:
        return [_HEADS[part]]
    if is_plain:
        return ["mlp_extractor.policy_net" if part == "encoder" else "mlp_extractor.value_net"]
    if part == "critic_encoder":
        return ["vf_features_extractor.encoder"]
    prefixes = ["features_extractor.encoder", "pi_features_extractor.encoder"]
    return [*prefixes, "vf_features_extractor.encoder"] if shared else prefixes


def from_sb3(parameters: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Return the parameters of SB3's MlpPolicy under Lockstep's names."""
    if not any(name.startswith("mlp_extractor.policy_net.") for name in parameters):
        raise ConfigError(
            f"the policy in {path} has a network that Lockstep does not have.",
            "Import an MlpPolicy. For a policy that Lockstep exported, import its safetensors file.",
        )
    prefixes = {
        "mlp_extractor.policy_net.": "net.encoder.layers.",
        "mlp_extractor.value_net.": "net.critic_encoder.layers.",
        "action_net.": "net.policy_head.",
        "value_net.": "net.value_head.",
        "log_std": "net.log_std",
    }
    return {
        new_prefix + name.removeprefix(prefix): tensor
        for prefix, new_prefix in prefixes.items()
        for name, tensor in parameters.items()
        if name.startswith(prefix)
    }


def read_sb3(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the plain JSON of a file and the parameters of its policy. Pickles in the JSON are not loaded."""
    try:
        with open_regular(path) as opened, open_zip(opened) as file:
            found = entries(file)
            if not {"data", "policy.pth"} <= found.keys():
                raise ValueError("it has no data and policy.pth")
            data, policy = found["data"], found["policy.pth"]
            # Weights hardly compress, so a policy that expands to many times the file size is malicious.
            if data.file_size > DATA_BYTES or policy.file_size > max(64 * 2**20, 8 * path.stat().st_size):
                raise ValueError(f"its parts would take {data.file_size + policy.file_size:,} bytes")
            plain = parse_json(file.read(data).decode())
            if not isinstance(plain, dict):
                raise ValueError("its data is not a JSON object")
            return plain, read_torch(io.BytesIO(file.read(policy)))
    except (OSError, UnreadableFileError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(
            f"{path} is not a file of Stable-Baselines3: {first_line(error)}", "Give a file that model.save() wrote."
        ) from None


def settings_of(data: dict[str, Any], parameters: dict[str, Tensor]) -> dict[str, Any]:
    """Return the recipe settings for the network in a file, as far as its JSON and tensor shapes give them."""
    widths: list[int] = []
    while (weight := parameters.get(f"mlp_extractor.policy_net.{2 * len(widths)}.weight")) is not None:
        # Check that layer sizes are consistent, so that the network is not larger than the file.
        if weight.dim() != 2 or 0 in weight.shape or (widths and weight.shape[1] != widths[-1]):
            raise ConfigError(
                f"the layers of the policy do not fit together: layer {len(widths)} is {tuple(weight.shape)}.",
                "Give a file that Stable-Baselines3 wrote.",
            )
        widths.append(int(weight.shape[0]))
    arguments = data.get("policy_kwargs")
    name = arguments.get("activation_fn", "Tanh") if isinstance(arguments, dict) else "Tanh"
    activation = "relu" if isinstance(name, str) and "ReLU" in name else "tanh"
    network = {"hidden_sizes": widths, "num_layers": len(widths), "activation": activation} if widths else {}
    return {f"algo.encoder.{key}": value for key, value in network.items()}


# -- contents of a file ------------------------------------------------------------------------------------------------


def _data(algorithm: PPO) -> dict[str, Any]:
    config, task = algorithm.config, algorithm.task
    is_dict = isinstance(task.observation_space, spaces.Dict)
    policy = "MultiInputActorCriticPolicy" if is_dict else "ActorCriticPolicy"
    return {
        "policy_class": _serialized(PickleGlobal(_POLICIES, policy)),
        "policy_kwargs": _serialized(_policy_arguments(algorithm)),
        "observation_space": _serialized(_space(task.observation_space)),
        "action_space": _serialized(_space(task.action_space)),
        "n_envs": 1,
        "verbose": 0,
        "use_sde": False,
        "learning_rate": config.learning_rate,
        "n_steps": config.rollout_steps,
        "gamma": config.gamma,
        "gae_lambda": config.gae_lambda,
    }


def _policy_arguments(algorithm: PPO) -> dict[str, Any]:
    config = algorithm.config.encoder
    if _is_plain(algorithm):
        layers = list(config.widths)
        activation = "Tanh" if config.activation == "tanh" else "ReLU"
        return {
            "net_arch": {"pi": layers, "vf": layers},
            "activation_fn": PickleGlobal("torch.nn.modules.activation", activation),
        }
    moments = [[name, len(mean)] for name, (mean, _) in algorithm.normalizer.frozen.items()]
    encoder = dataclasses.asdict(config) | {"hidden_sizes": list(config.hidden_sizes)}
    return {
        "net_arch": [],
        "ortho_init": False,  # fails for channels-last weights; the weights are loaded anyway
        "normalize_images": False,
        "share_features_extractor": algorithm.net.critic_encoder is None,
        "features_extractor_class": PickleGlobal("lockstep.tools.export.sb3_features", "Features"),
        "features_extractor_kwargs": {"encoder": encoder, "moments": moments},
    }


def _serialized(value: Any) -> dict[str, str]:
    return {":type:": "written by lockstep", ":serialized:": base64.b64encode(pickled(value)).decode()}


def _space(space: Space[Any]) -> PickleReduce:
    match space:
        case spaces.Box():
            dtype = PickleReduce(PickleGlobal("numpy", "dtype"), (np.dtype(space.dtype).name,))
            return PickleReduce(
                PickleGlobal(_SPACES, "Box"), (_bound(space.low, dtype), _bound(space.high, dtype), space.shape, dtype)
            )
        case spaces.Discrete():
            return PickleReduce(PickleGlobal(_SPACES, "Discrete"), (int(space.n), None, int(space.start)))
        case spaces.MultiDiscrete():
            return PickleReduce(PickleGlobal(_SPACES, "MultiDiscrete"), ([int(count) for count in space.nvec],))
        case spaces.Dict():
            return PickleReduce(
                PickleGlobal(_SPACES, "Dict"), ({name: _space(part) for name, part in space.spaces.items()},)
            )
    raise ConfigError(f"Stable-Baselines3 does not support the space {space}.", "Use --to onnx, or --to pt2.")


def _bound(values: np.ndarray, dtype: PickleReduce) -> Any:
    """Return one number if all values are equal, otherwise an array."""
    if (values == values.flat[0]).all():
        return values.flat[0].item()
    return PickleReduce(PickleGlobal("numpy", "array"), (values.tolist(), dtype))


def _fresh_optimizer(algorithm: PPO) -> dict[str, Any]:
    """Return the state of SB3's Adam before its first step."""
    parameters = [torch.zeros(1, requires_grad=True) for _ in algorithm.net.parameters()]
    return torch.optim.Adam(parameters, lr=algorithm.config.learning_rate, eps=1e-5).state_dict()


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
