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
        inputs = [letter for letter in self.letters if letter in kept]
        return "".join(inputs) + self.rank

    @property
    def b(self) -> str:
        """The axes of `lora_b`."""
        inputs = self.batch + self.contracted
        outputs = [letter for letter in self.letters if letter not in inputs]
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
        stacked = values[:num_stacked]
        known = dict(zip(self.letters, values[num_stacked:], strict=True))
        known[self.rank] = rank
        picked = [known[letter] for letter in letters]
        return (*stacked, *picked)


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
    # Neither a diagonal of the kernel nor a sum over an axis of the kernel alone.
    has_repeated_letter = len(set(kernel)) < len(kernel)
    if has_repeated_letter or not kernel.isalpha():
        return None
    if not set(kernel) <= set(inputs + outputs):
        return None

    contracted = ""
    batch = ""
    for letter in kernel:
        if letter in inputs and letter in outputs:
            batch += letter
        elif letter in inputs:
            contracted += letter
    used = inputs + kernel + outputs
    unused = [letter for letter in string.ascii_letters if letter not in used]
    axes = Axes(kernel, contracted, batch, rank=unused[0])
    return inputs, axes, outputs
