"""Definition and constants of random draws, shared by the CPU, torch and Triton implementations.

Philox4x32-10 (Salmon et al. 2011) maps a 64-bit key and a 128-bit counter to a block of four 32-bit words. Draw number
`counter` of a key has 2**64 blocks: block b is Philox of the counter words (b low, b high, counter low, counter high).
Word w of a draw is word w % 4 of block w // 4. An element is a pure function of its own word or words:

| draw     | words      | element                                                                  |
| -------- | ---------- | ------------------------------------------------------------------------ |
| uniform  | w          | upper 24 bits x 2**-24, in [0, 1)                                        |
| event    | w          | w < round(probability x 2**32), so probabilities have a step of 2**-32   |
| normal   | w          | sign from bit 0, magnitude by inverse CDF from the 31 bits above it      |
| gumbel   | w          | -log(-log(u)) with u from the upper 31 bits                              |
| integers | 2e, 2e + 1 | upper half of the product of 64 bits (first word low) and the bound      |
| orders   | 2e, 2e + 1 | the upper 63 of the 64 bits, as a key to sort by                         |

A permutation is the order of such keys. First, the lowest bits of each key are replaced by its index in the row. A
sorted key then contains its original index, and no two keys are equal.

Floating-point arithmetic is float32 +, -, * and / without fused multiply-add, so that all implementations round
identically. Logarithms are therefore polynomials. `-x` is written `0 - x` if x can be zero, because Triton negates that
way and the sign of zero would differ otherwise.
"""

from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["uniform", "event", "normal", "gumbel", "integers", "orders"]
WIDE: frozenset[Kind] = frozenset({"integers", "orders"})
"""Draws that take two words per element."""

ROUNDS = 10
MULTIPLY_0, MULTIPLY_2 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
"""Added to the two halves of the key after each round."""

MAX_BOUND = 2**32
"""Largest bound of random integers: above it, the product with 64 random bits does not fit into 96 bits."""

# log(1 + f) = f - f**2 / 2 + f**3 R(f) for 1 + f in [sqrt(1/2), sqrt(2)); relative error 3e-8 before rounding.
LOG = (0.3333391, -0.25001338, 0.19963063, -0.16577584, 0.14914772, -0.14267503, 0.08700445)
LOG_2 = 0.6931472
ROOT_HALF_BITS = 0x3F3504F3
"""sqrt(1/2) as the bits of a float32: subtracting it splits a number into exponent and mantissa around 1."""

# With t the two-sided tail probability of a normal deviate z, x = 1 - t and w = -log(1 - x**2):
# z = x P(w) / Q(w) for w in [0, 21.5]; relative error 1.1e-7 before rounding. The largest deviate is 6.3.
NORMAL_P = (1.2533143, 0.45261684, 0.08989986, 0.011887061, 0.0010007801, 2.9254514e-05)
NORMAL_Q = (1.0, 0.099339396, 0.032679766, 0.0022849403, 0.0001697705, 1.0063721e-06)
