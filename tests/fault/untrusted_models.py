"""Small malicious weight files that `lockstep import` must refuse with a message."""

import io
import json
import os
import pickle
import struct
import zipfile

import torch


def safetensors(header, body=b"", length=None):
    """Return a safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def one(shape=(1,), dtype="F32", offsets=(0, 4), name="net.log_std", **metadata):
    """Return a header with one tensor."""
    return {"__metadata__": metadata, name: {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}}


def saved(value):
    """Return a file as torch saves it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def archive(parts, compression=zipfile.ZIP_STORED):
    """Return a zip of named parts."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as out:
        for name, content in parts.items():
            out.writestr(name, content)
    return file.getvalue()


def torch_file(pickle, storage=b"\0" * 4, **more):
    """Return a file in torch's format with any pickle and one storage."""
    parts = {"a/data.pkl": pickle, "a/byteorder": b"little", "a/data/0": storage, "a/version": b"3\n"} | more
    return archive(parts)


def called(function, *arguments):
    """Return a pickle that calls a function when it is loaded."""

    class Called:
        def __reduce__(self):
            return function, arguments

    return pickle.dumps(Called(), protocol=2)


def sb3(parameters=None, data=b"{}", policy=None, compression=zipfile.ZIP_STORED, **more):
    """Return a file as Stable-Baselines3 saves it."""
    policy = saved(parameters) if policy is None else policy
    return archive({"data": data, "policy.pth": policy} | more, compression)


def layers(*shapes):
    """Return weights of SB3's policy network."""
    return {f"mlp_extractor.policy_net.{2 * n}.weight": torch.zeros(shape) for n, shape in enumerate(shapes)}


def config(**settings):
    """Return a file of `lockstep export` with settings."""
    return safetensors(one(recipe="gym-ppo", config=json.dumps(settings)), b"\0" * 4)


def bomb(size):
    """Return a zip bomb that expands to `size` bytes, about a thousand times its own size."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        out.writestr("data", b"{}")
        with out.open("policy.pth", "w", force_zip64=True) as part:
            for _ in range(size // 2**20):
                part.write(b"\0" * 2**20)
    return file.getvalue()


def lying(content, claimed):
    """Return a zip whose central directory states a wrong size."""
    place = content.rfind(b"PK\x01\x02")
    return content[: place + 24] + struct.pack("<I", claimed) + content[place + 28 :]


def encrypted(content):
    """Return a zip whose parts are marked as encrypted."""
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = content.find(mark)
        while place >= 0:
            content = content[: place + offset] + b"\x01\x00" + content[place + offset + 2 :]
            place = content.find(mark, place + 4)
    return content


def many_entries(count):
    """Return a zip with a long central directory, without Python's zipfile, which would take a minute."""
    entry = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 20, 20, 0, 0, 0, 33, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 33, 0, 0, 0, 1, 0) + b"a"
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count % 2**16, count % 2**16, len(entry) * count, len(local), 0)
    return local + entry * count + end


DEEP = b"[" * 100_000
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}

MODELS = {
    # safetensors
    "header beyond the file.safetensors": lambda: safetensors(one(), length=2**40),
    "header of 64 MiB.safetensors": lambda: safetensors(b" " * (64 * 2**20)),
    "900,000 empty tensors.safetensors": lambda: safetensors(
        ("{" + ",".join(f'"{n}":{json.dumps(EMPTY)}' for n in range(900_000)) + "}").encode()
    ),
    "50,000 empty tensors.safetensors": lambda: safetensors({str(n): EMPTY for n in range(50_000)}),
    "deep header.safetensors": lambda: safetensors(DEEP),
    "deep metadata.safetensors": lambda: safetensors(one(recipe="gym-ppo", config=DEEP.decode()), b"\0" * 4),
    "nested settings.safetensors": lambda: safetensors(
        one(recipe="gym-ppo", config='{"task":{"options":' + '{"a":' * 500 + "1" + "}" * 502), b"\0" * 4
    ),
    "settings that are a list.safetensors": lambda: safetensors(one(recipe="gym-ppo", config="[1]"), b"\0" * 4),
    "settings that are a number.safetensors": lambda: config(task=3, algo="x"),
    "a billion environments.safetensors": lambda: config(task={"num_envs": 8 * 10**9}),
    "a network of a terabyte.safetensors": lambda: config(algo={"encoder": {"hidden_sizes": [10**6, 10**6]}}),
    "a horizon of a terabyte.safetensors": lambda: config(algo={"rollout_steps": 10**12}),
    "a task that imports a module.safetensors": lambda: config(task={"id": "antigravity:A-v0"}),
    "a task with a zero byte.safetensors": lambda: config(task={"id": "a\0b"}),
    "a recipe of escapes.safetensors": lambda: safetensors(one(recipe="\x1b[2J\x07", config="{}"), b"\0" * 4),
    "a name of escapes.safetensors": lambda: safetensors(
        one(name="\x1b[2J" + "x" * 10**6, recipe="gym-ppo"), b"\0" * 4
    ),
    "a scalar.safetensors": lambda: safetensors(one(shape=(), recipe="gym-ppo"), b"\0" * 4),
    "not finite.safetensors": lambda: safetensors(one(recipe="gym-ppo"), struct.pack("<f", float("nan"))),
    "complex numbers.safetensors": lambda: safetensors(one(dtype="C64", offsets=(0, 8), recipe="gym-ppo"), b"\0" * 8),
    "overlapping tensors.safetensors": lambda: safetensors(one() | {"b": one()["net.log_std"]}, b"\0" * 4),
    "empty.safetensors": lambda: b"",
    # torch
    "empty.pt": lambda: b"",
    "text.pt": lambda: b"hello",
    "code.pt": lambda: torch_file(called(os.system, "touch was-here")),
    "bytes of a terabyte.pt": lambda: torch_file(called(bytearray, 10**12)),
    "a list.pt": lambda: saved([1, 2]),
    "numbers for names.pt": lambda: saved({1: torch.zeros(1)}),
    "stride 0.pt": lambda: saved({"net.log_std": torch.zeros(1).expand(10**12)}),
    "views of one another.pt": lambda: saved({f"w{n}": x for x in [torch.zeros(2**18)] for n in range(5000)}),
    "900,000 empty tensors.pt": lambda: torch_file(b"\x80\x02(" + b"X\x01\0\0\0aN" * 900_000 + b"d."),
    "11,000 tensors.pt": lambda: saved({str(n): x for x in [torch.zeros(1)] for n in range(11_000)}),
    "a deep pickle.pt": lambda: torch_file(b"\x80\x02" + b"]" * 10**6 + b"a" * (10**6 - 1) + b"."),
    "sparse.pt": lambda: saved({"net.log_std": torch.zeros(3).to_sparse()}),
    "quantized.pt": lambda: saved({"net.log_std": torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)}),
    "meta.pt": lambda: saved({"net.log_std": torch.zeros(10**9, device="meta")}),
    "compressed.pt": lambda: archive(
        {"a/data.pkl": b"\x80\x02}.", "a/data/0": b"\0" * 2**28, "a/version": b"3\n"}, zipfile.ZIP_DEFLATED
    ),
    "a long table of contents.pt": lambda: many_entries(900_000),
    "before 1.6.pt": lambda: b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + b"\x80\x02M\xe9\x03.",
    # Stable-Baselines3
    "empty.zip": lambda: b"",
    "no policy.zip": lambda: archive({"data": b"{}"}),
    "3 GiB in 3 MB.zip": lambda: bomb(3 * 2**30),
    "a long table of contents.zip": lambda: many_entries(900_000),
    "a lying size.zip": lambda: lying(sb3(layers((8, 4)), compression=zipfile.ZIP_DEFLATED), 2**31),
    "a password.zip": lambda: encrypted(sb3(layers((8, 4)))),
    "deep data.zip": lambda: sb3(layers((8, 4)), data=DEEP),
    "data of 60 MB.zip": lambda: sb3(layers((8, 4)), data=b"[" + b"{}," * 20_000_000 + b"0]"),
    "data that is a list.zip": lambda: sb3(layers((8, 4)), data=b"[]"),
    "arguments that are a list.zip": lambda: sb3(layers((8, 4)), data=b'{"policy_kwargs": [1]}'),
    "a scalar layer.zip": lambda: sb3(layers(())),
    "a layer of nothing.zip": lambda: sb3(layers((0, 4))),
    "layers that do not fit.zip": lambda: sb3(layers((10**6, 1), (10**6, 1))),
    "stride 0.zip": lambda: sb3(
        {"mlp_extractor.policy_net.0.weight": torch.zeros(1).expand(10**9, 4), "action_net.weight": torch.zeros(2, 4)}
    ),
    "another network.zip": lambda: sb3({"conv.weight": torch.zeros(3)}),
}
"""File name and content."""
