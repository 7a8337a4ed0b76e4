"""Encoders: selection by space, feature sizes, input scaling, memory formats and initialization."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.config import ConfigError
from lockstep.nn.actor_critic import ActorCritic
from lockstep.nn.distributions import make_distribution
from lockstep.nn.encoders import CNN, MLP, DictEncoder, EncoderConfig, build_encoder, orthogonal_init
from lockstep.nn.q_networks import Actor, make_critic
from lockstep.rng import RandomStream, seeded_init

BOARD = spaces.Box(0, 1, (3, 6, 6), np.uint8)
PICTURE = spaces.Box(0, 255, (3, 6, 6), np.uint8)
VECTOR = spaces.Box(-1, 1, (5,), np.float32)
SMALL = EncoderConfig(hidden_sizes=(8,), num_layers=2, out_features=16)


def build(space, config=SMALL, seed=0):
    with seeded_init(RandomStream(seed, "init")):
        return build_encoder(space, config)


def pixels(count=4, high=2, seed=0):
    return torch.randint(high, (count, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def layers_of(encoder, kind):
    return [module for module in encoder.modules() if isinstance(module, kind)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9), st.integers(1, 5))
def test_mlp_has_configured_width_and_depth(width, depth, inputs, count):
    encoder = build(spaces.Box(-1, 1, (inputs,), np.float32), EncoderConfig(hidden_sizes=(width,), num_layers=depth))
    assert isinstance(encoder, MLP)
    assert [layer.out_features for layer in layers_of(encoder, nn.Linear)] == [width] * depth
    assert encoder(torch.zeros(count, inputs)).shape == (count, width)
    assert encoder.features == width


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_non_image_box_is_flattened(shape):
    encoder = build(spaces.Box(-1, 1, shape, np.float32))
    assert isinstance(encoder, MLP)
    assert encoder(torch.zeros(4, *shape)).shape == (4, 8)


@pytest.mark.parametrize("kind", ["mlp", "cnn"])
@pytest.mark.parametrize("space", [BOARD, PICTURE])
def test_uint8_input_under_autocast_equals_float_input(kind, space):
    encoder = build(space, EncoderConfig(kind=kind, hidden_sizes=(8,), num_layers=2, out_features=16))
    scale, seen = encoder.scale, pixels(high=int(space.high.max()) + 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        direct = encoder(seen)
        encoder.scale = 1.0
        by_way_of_floats = encoder(seen.float() * scale)
    assert direct.dtype == torch.bfloat16
    assert torch.equal(direct, by_way_of_floats)


@pytest.mark.parametrize("size", [(4, 4), (5, 7), (12, 12)])
def test_cnn_accepts_any_board_size(size):
    encoder = build(spaces.Box(0, 1, (3, *size), np.uint8))
    assert isinstance(encoder, CNN)
    assert encoder(torch.zeros(2, 3, *size, dtype=torch.uint8)).shape == (2, 16)
    assert encoder.features == 16


def test_mlp_kind_flattens_board():
    encoder = build(BOARD, EncoderConfig(kind="mlp", hidden_sizes=(8,)))
    assert isinstance(encoder, MLP)
    assert layers_of(encoder, nn.Linear)[0].in_features == 3 * 6 * 6
    vector = build(spaces.Box(0, 1, (3 * 6 * 6,), np.uint8), EncoderConfig(hidden_sizes=(8,)))
    assert torch.equal(encoder(pixels()), vector(pixels().flatten(1)))


def test_cnn_kind_rejects_non_image_spaces():
    config = EncoderConfig(kind="cnn", hidden_sizes=(8,), out_features=16)
    assert isinstance(build(BOARD, config), CNN)
    for space in (VECTOR, spaces.Box(-1, 1, (2, 3), np.float32), spaces.Dict({"board": BOARD, "speed": VECTOR})):
        with pytest.raises(ConfigError, match=r"encoder.kind is cnn, but .* are not images.\nUse auto or mlp."):
            build(space, config)


@pytest.mark.parametrize(
    ("kind", "shape", "inputs"),
    [
        ("cnn", (96, 96, 3), 48 * 48 * 64),
        ("cnn", (3, 210, 160), 105 * 80 * 64),
        ("impala", (500, 500, 3), 63 * 63 * 32),
        ("mlp", (96, 96, 3), 96 * 96 * 3),
    ],
)
def test_too_large_image_error_names_encoder_to_use(kind, shape, inputs):
    space = spaces.Box(0, 255, shape, np.uint8)
    words = rf"algo.encoder.kind {kind}: .* {inputs:,} inputs (.|\n)*--algo.encoder.kind nature"
    for observations in (space, spaces.Dict({"speed": VECTOR, "camera": space})):
        with pytest.raises(ConfigError, match=words):
            EncoderConfig(kind=kind).check_image_size(observations)
        EncoderConfig(kind="nature").check_image_size(observations)


@pytest.mark.parametrize("shape", [(3, 32, 32), (64, 64, 3)])
def test_board_and_small_image_fit_default_encoder(shape):
    EncoderConfig().check_image_size(spaces.Box(0, 1, shape, np.uint8))
    EncoderConfig(kind="mlp").check_image_size(spaces.Box(0, 1, shape, np.uint8))


def test_custom_network_accepts_any_image():
    class Custom(EncoderConfig):
        def build(self, space):
            return nn.Flatten()

    Custom().check_image_size(spaces.Box(0, 255, (210, 160, 3), np.uint8))


@pytest.mark.parametrize(("shape", "inputs"), [((84, 84, 4), 64 * 7 * 7), ((3, 36, 36), 64), ((96, 96, 3), 64 * 8 * 8)])
def test_nature_cnn_has_published_layers(shape, inputs):
    encoder = build(spaces.Box(0, 255, shape, np.uint8), EncoderConfig(kind="nature", out_features=512))
    layers = [(layer.out_channels, layer.kernel_size[0], layer.stride[0]) for layer in layers_of(encoder, nn.Conv2d)]
    assert layers == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]
    assert layers_of(encoder, nn.Linear)[0].in_features == inputs
    assert encoder(torch.zeros(2, *shape, dtype=torch.uint8)).shape == (2, 512)


@pytest.mark.parametrize(
    ("shape", "high", "strided"),
    [
        ((84, 84, 4), 255, True),
        ((12, 84, 84), 255, True),  # four color frames
        ((36, 36, 3), 255, True),
        ((35, 64, 3), 255, False),
        ((3, 40, 40), 1, False),  # a board
        ((3, 84, 84), 1, True),  # a board that is too large for 3x3 convolutions
    ],
)
def test_auto_selects_strided_convolutions_for_camera_images(shape, high, strided):
    space = spaces.Box(0, high, shape, np.uint8)
    EncoderConfig().check_image_size(space)
    strides = {layer.stride[0] for layer in layers_of(build(space, EncoderConfig()), nn.Conv2d)}
    assert strides == ({4, 2, 1} if strided else {1})


@pytest.mark.parametrize(("shape", "inputs"), [((84, 84, 4), 32 * 11 * 11), ((3, 11, 7), 32 * 2 * 1)])
def test_impala_cnn_has_published_layers(shape, inputs):
    encoder = build(spaces.Box(0, 255, shape, np.uint8), EncoderConfig(kind="impala"))
    channels = [layer.out_channels for layer in layers_of(encoder, nn.Conv2d)]
    assert channels == [16] * 5 + [32] * 10
    assert layers_of(encoder, nn.Linear)[0].in_features == inputs
    images = torch.randint(256, (2, *shape), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    features = encoder(images)
    assert features.shape == (2, 256)
    # A block adds to its input: without its second convolution, it is the identity.
    block = encoder.layers[2]
    nn.init.zeros_(block.layers[3].weight)
    x = torch.randn(1, 16, 4, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(block(x.clone()), x)
    encoder(images).sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


def test_nature_cnn_rejects_small_image_and_encodes_vector_of_dict():
    with pytest.raises(ConfigError, match=r"too small(.|\n)*--algo.encoder.kind cnn"):
        build(spaces.Box(0, 255, (3, 35, 36), np.uint8), EncoderConfig(kind="nature"))
    camera = spaces.Box(0, 255, (36, 36, 3), np.uint8)
    encoder = build(spaces.Dict({"camera": camera, "speed": VECTOR}), EncoderConfig(kind="nature"))
    assert [type(part) for part in encoder.parts.values()] == [CNN, MLP]


def test_hidden_sizes_last_entry_repeats_for_remaining_layers():
    def channels(*width, depth):
        config = EncoderConfig(hidden_sizes=width, num_layers=depth)
        return [layer.out_channels for layer in layers_of(build(BOARD, config), nn.Conv2d)]

    assert channels(8, depth=3) == [8, 8, 8]
    assert channels(4, 12, depth=3) == [4, 12, 12]
    assert channels(4, 12, 16, depth=2) == [4, 12]


def test_uint8_image_is_scaled_by_maximum():
    bright, dim = build(PICTURE), build(BOARD)
    dim.load_state_dict(bright.state_dict())
    board = pixels()
    torch.testing.assert_close(bright(board * 255), dim(board))
    assert not torch.allclose(bright(board * 255), bright(board))  # the scale matters


def test_uint8_vector_is_scaled_by_maximum():
    memory, vector = build(spaces.Box(0, 255, (16,), np.uint8)), build(spaces.Box(0, 1, (16,), np.float32))
    memory.load_state_dict(vector.state_dict())
    read = torch.arange(32, dtype=torch.uint8).view(2, 16)
    torch.testing.assert_close(memory(read), vector(read / 255))


def test_channels_last_image_equals_channels_first():
    first, last = build(spaces.Box(0, 255, (3, 10, 12), np.uint8)), build(spaces.Box(0, 255, (10, 12, 3), np.uint8))
    last.load_state_dict(first.state_dict())
    frames = torch.arange(2 * 3 * 10 * 12).view(2, 3, 10, 12).to(torch.uint8)
    torch.testing.assert_close(last(frames.movedim(1, -1).contiguous()), first(frames))
    assert not build(spaces.Box(0, 1, (8, 3, 3), np.uint8)).channels_last  # eight planes of a small board


def test_float_image_is_not_scaled():
    floats = build(spaces.Box(0, 255, (3, 6, 6), np.float32))
    board = build(BOARD)
    floats.load_state_dict(board.state_dict())
    assert torch.equal(floats(pixels().float()), board(pixels()))


def test_channels_last_memory_format_does_not_change_values():
    encoder = build(BOARD)
    convolutions = layers_of(encoder, nn.Conv2d)
    assert all(layer.weight.is_contiguous(memory_format=torch.channels_last) for layer in convolutions)
    board = pixels(high=2)
    x = board.float()
    for layer in encoder.layers:  # the same layers on contiguous weights and input
        plain = layer
        if isinstance(layer, nn.Conv2d):
            plain = nn.Conv2d(layer.in_channels, layer.out_channels, 3, padding=1)
            plain.load_state_dict({name: tensor.contiguous() for name, tensor in layer.state_dict().items()})
            assert plain.weight.is_contiguous()
        x = plain(x)
    torch.testing.assert_close(encoder(board), encoder.dense(x.movedim(1, -1).flatten(1)))


def test_pooling_before_relu_is_bit_identical():
    encoder, board = build(BOARD), pixels(high=2)
    *convolutions, pooling, relu = encoder.layers
    assert isinstance(pooling, nn.MaxPool2d)
    encoder(board).square().sum().backward()
    came = {name: parameter.grad.clone() for name, parameter in encoder.named_parameters()}
    features = encoder(board)
    encoder.layers = nn.Sequential(*convolutions, relu, pooling)  # the usual order
    encoder.zero_grad()
    assert torch.equal(encoder(board), features)
    encoder(board).square().sum().backward()
    for name, parameter in encoder.named_parameters():
        assert torch.equal(parameter.grad, came[name]), name


def test_cnn_flatten_makes_no_copy():
    encoder = build(BOARD)
    entered: list[torch.Tensor] = []
    encoder.dense.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    left: list[torch.Tensor] = []
    encoder.layers.register_forward_hook(lambda _, __, output: left.append(output))
    encoder(pixels())
    assert entered[0].data_ptr() == left[0].data_ptr()


def test_encoder_output_is_independent_of_memory_format():
    encoder, board = build(BOARD), pixels()
    assert torch.equal(encoder(board), encoder(board.contiguous(memory_format=torch.channels_last)))


def test_dict_encoder_concatenates_features_of_parts():
    space = spaces.Dict({"board": BOARD, "inner": spaces.Dict({"speed": VECTOR, "place": VECTOR})})
    encoder = build(space)
    assert isinstance(encoder, DictEncoder)
    obs = {"board": pixels(), "inner": {"place": torch.randn(4, 5), "speed": torch.randn(4, 5)}}
    features = encoder(obs)
    assert features.shape == (4, 16 + 8 + 8)
    assert encoder.features == 32
    # Each part has its own features, independent of the order of the observation dict.
    moved = encoder({**obs, "board": pixels(seed=1)})
    changed = (moved != features).any(0)
    assert changed.sum() > 0
    where = changed.nonzero().flatten()
    assert where.max() - where.min() < 16
    swapped = encoder({"inner": dict(reversed(obs["inner"].items())), "board": obs["board"]})
    assert torch.equal(swapped, features)


def test_build_encoder_rejects_unsupported_space():
    with pytest.raises(ConfigError, match=r"have no encoder.\nUse Box or Dict spaces"):
        build_encoder(spaces.Discrete(3), SMALL)


class Own(nn.Linear):
    features = 7


@dataclass(frozen=True, kw_only=True)
class OwnConfig(EncoderConfig):
    def build(self, space):
        return Own(space.shape[0], Own.features)


def test_custom_encoder_config_is_used_by_all_networks():
    config, choice = OwnConfig(), spaces.Discrete(2)
    net = ActorCritic(VECTOR, make_distribution(choice), config)
    found = [
        net.encoder,
        net.critic_encoder,
        Actor(VECTOR, 2, config).encoder,
        make_critic(VECTOR, 2, 1, config, "first").encoder,  # a custom network does not see the action
    ]
    assert [type(encoder) for encoder in found] == [Own] * 4
    assert net(torch.zeros(3, 5))[0].shape == (3, 2)


# ------------------------------------------------------------------------------------------------------- initialization


def test_initialization_depends_only_on_stream():
    def weights(seed):
        return torch.cat([tensor.flatten() for tensor in build(BOARD, seed=seed).state_dict().values()])

    torch.manual_seed(1)
    first = weights(0)
    torch.manual_seed(2)
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)


def test_initialization_keeps_global_random_state():
    before = torch.get_rng_state()
    build(BOARD)
    assert torch.equal(torch.get_rng_state(), before)


def test_orthogonal_init_has_given_gain_and_zero_bias():
    layer = orthogonal_init(nn.Linear(8, 4), 3.0)
    torch.testing.assert_close(layer.weight @ layer.weight.T, 9.0 * torch.eye(4))
    assert not layer.bias.any()
