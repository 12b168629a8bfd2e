"""The axes of a weight, and the shapes of its two narrow matrices.

Each axis has a letter, as in an einsum. `lora_a` has the axes that the layer sums over,
and `lora_b` has the axes of its outputs. Both have the axis of the rank, and all axes
along which a layer has several weights.
"""

import string
from collections.abc import Sequence
from typing import Any, NamedTuple


class Axes(NamedTuple):
    """The letters of the axes of one weight, without the axes of a stack of layers.

    Attributes:
        letters: All axes, in their order.
        contracted: The axes that the layer sums over.
        batch: The axes that inputs, weight and outputs have in common.
        rank: The letter for the axis of the rank.
    """

    letters: str
    contracted: str
    batch: str = ""
    rank: str = "R"

    @property
    def a(self) -> str:
        """The axes of `lora_a`."""
        kept = self.batch + self.contracted
        return "".join(each for each in self.letters if each in kept) + self.rank

    @property
    def b(self) -> str:
        """The axes of `lora_b`."""
        outputs = [x for x in self.letters if x not in self.batch + self.contracted]
        return self.batch + self.rank + "".join(outputs)

    @property
    def product(self) -> str:
        """The equation of `lora_a @ lora_b`, for one layer or a stack of layers."""
        return f"...{self.a},...{self.b}->...{self.letters}"

    def pick(self, letters: str, values: Sequence[Any], rank: Any) -> tuple[Any, ...]:
        """Returns the values of some axes, given the values of the weight's axes.

        The values for the axes of a stack come first.
        """
        num_stacked = len(values) - len(self.letters)
        known = dict(zip(self.letters, values[num_stacked:], strict=True))
        known[self.rank] = rank
        return (*values[:num_stacked], *(known[letter] for letter in letters))


MATRIX = Axes("io", contracted="i")
"""A weight of shape `(inputs, outputs)`."""


def make_general_axes(num_batch: int, num_in: int, num_out: int) -> Axes:
    """Returns the axes of the kernel of an `nnx.LinearGeneral`."""
    letters = string.ascii_lowercase[: num_batch + num_in + num_out]
    contracted = letters[num_batch : num_batch + num_in]
    return Axes(letters, contracted, batch=letters[:num_batch])


def parse_equation(equation: str) -> tuple[str, Axes, str] | None:
    """Returns the axes of inputs, kernel and outputs of an einsum.

    It returns `None` if no product of two matrices can replace the kernel.
    """
    inputs, _, rest = equation.replace(" ", "").partition(",")
    kernel, _, outputs = rest.partition("->")
    others = inputs + outputs
    is_plain = kernel.isalpha() and len(set(kernel)) == len(kernel)
    if not is_plain or any(letter not in others for letter in kernel):
        return None

    contracted = "".join(x for x in kernel if x in inputs and x not in outputs)
    batch = "".join(x for x in kernel if x in inputs and x in outputs)
    unused = (x for x in string.ascii_letters if x not in inputs + kernel + outputs)
    return inputs, Axes(kernel, contracted, batch, rank=next(unused)), outputs
