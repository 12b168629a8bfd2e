"""Multiple-choice questions, answered by likelihood, as lm-evaluation-harness does it.

A model answers a question with the choice of the highest log-likelihood, given the
context. For `accuracy_norm`, the log-likelihood is divided by the length of the choice.
`generation.py` evaluates a GPT with these functions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from decoding import score
from gpt import EDGE, GPT


class Question(NamedTuple):
    """Tokens of a context and of each choice, and the number of the right choice."""

    context: Sequence[int]
    choices: Sequence[Sequence[int]]
    answer: int


def make_rows(questions: Sequence[Question]) -> dict[str, np.ndarray]:
    """Returns the questions as arrays, with padding for missing choices.

    Returns:
        `tokens` and `weights` of shape `(questions, choices, length)`, where the
        weight is 1 for the tokens of a choice, and `answer`, `(questions,)`. A row
        begins with `EDGE`.
    """
    num_choices = max(len(question.choices) for question in questions)
    length = 0
    for question in questions:
        longest = max(map(len, question.choices))
        length = max(length, 1 + len(question.context) + longest)

    shape = len(questions), num_choices, length
    tokens = np.full(shape, EDGE, np.int32)
    weights = np.zeros(shape, np.float32)
    for number, question in enumerate(questions):
        begin = 1 + len(question.context)
        for place, choice in enumerate(question.choices):
            end = begin + len(choice)
            tokens[number, place, 1:begin] = question.context
            tokens[number, place, begin:end] = choice
            weights[number, place, begin:end] = 1
    answers = np.array([question.answer for question in questions], np.int32)
    return {"tokens": tokens, "weights": weights, "answer": answers}


def answer(model: GPT, batch: dict) -> dict[str, jax.Array]:
    """Returns whether each question was answered right, by both rules: `(batch,)`.

    A step of evaluation returns it, and the result has the mean over all questions.
    """
    shape = batch["tokens"].shape
    tokens = batch["tokens"].reshape(-1, shape[-1])
    weights = batch["weights"].reshape(-1, shape[-1])
    totals = score(model, tokens, weights).reshape(shape[:2])
    lengths = jnp.sum(batch["weights"], axis=-1)

    is_choice = lengths > 0
    totals = jnp.where(is_choice, totals, -jnp.inf)
    means = totals / jnp.maximum(lengths, 1.0)
    return {
        "accuracy": jnp.argmax(totals, axis=-1) == batch["answer"],
        "accuracy_norm": jnp.argmax(means, axis=-1) == batch["answer"],
    }
