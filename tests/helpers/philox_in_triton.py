"""Run by test_philox in a separate process, because Triton reads TRITON_INTERPRET when it is imported.

`interpreted` compares draws of the interpreted kernel with those of the CPU; `compiled` compiles the kernel for a GPU
that need not exist, and prints the floating-point instructions of its PTX.
"""

import re
import sys

import numpy as np
import torch

from lockstep.ops.philox import cpu, tensor_ops, triton_kernel

KEYS = np.array([0, 2**64 - 1, 0xA4093822299F31D0, 2**32], np.uint64)  # few: programs are interpreted one by one
DRAWS = [
    ("uniform", 0),
    ("event", round(0.01 * 2**32)),
    ("event", 2**32),
    ("normal", 0),
    ("gumbel", 0),
    ("integers", 1000),
    ("integers", 2**32),
    ("orders", 0),
]


def bits(x):
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def interpreted():
    triton_kernel._BLOCKS = 2**14  # few large programs
    keys = torch.from_numpy(KEYS.view(np.int64))
    for kind, bound in DRAWS:
        for counter, count in ((3, 40_000), (2**31 + 5, 4093), (2**64 - 1, 7)):  # 176,400 draws of each kind
            expected = bits(cpu.draw(kind, KEYS, counter, count, bound))
            in_memory = torch.tensor(np.uint64(counter).astype(np.int64))
            for given in (counter, in_memory) if count < 10**4 else (counter,):
                made = bits(triton_kernel.draw(kind, keys, given, count, bound))
                same = torch.equal(made, expected) and made.dtype == expected.dtype
                print(kind, counter, "same" if same else "DIFFERENT", flush=True)
    luck = np.random.default_rng(0)
    inputs = [torch.from_numpy(x) for x in luck.integers(-(2**63), 2**63, size=(3, 70_000))]
    inputs.append(torch.from_numpy(luck.integers(1, 2**32, size=70_000, endpoint=True)))
    same = torch.equal(triton_kernel.integers_at(*inputs), tensor_ops.integers_at(*inputs))
    print("integers_at", "same" if same else "DIFFERENT", flush=True)


def compiled():
    pointers = {"uniform": "*fp32", "normal": "*fp32", "gumbel": "*fp32", "event": "*i1"}
    for kind in dict(DRAWS):
        types = {
            "result": pointers.get(kind, "*i64"),
            "keys": "*i64",
            "counter": "*i64",
            "bound": "i64",
            "count": "i32",
        }
        report(kind, triton_kernel._draw, types, {"KIND": kind, "IN_MEMORY": True, "BLOCKS": 256})
    types = dict.fromkeys(("result", "keys", "major", "minor", "bound"), "*i64") | {"count": "i32"}
    report("integers_at", triton_kernel._integers_at, types, {"BLOCKS": 256})


def report(name, kernel, types, constants):
    import triton
    from triton.backends.compiler import GPUTarget

    source = triton.compiler.ASTSource(
        fn=kernel, signature=types | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=triton_kernel.OPTIONS).asm["ptx"]
    print(name, *sorted(set(re.findall(r"\b(?:fma|mad|mul|add|sub|div)\.[\w.]*f32\b", ptx))), flush=True)


if __name__ == "__main__":
    {"interpreted": interpreted, "compiled": compiled}[sys.argv[1]]()
