"""Generates text while a GPT trains, and evaluates it with multiple-choice questions.

It trains the GPT of `gpt.py`. After each 200 steps, an action continues some prompts
with a key-value cache, logs the text, and writes it to TensorBoard. A prompt has its
own random key, so one device and several write the same text.

    python examples/generation.py --strategy sharded --devices 2

An evaluation answers 294 questions about text that was held out: which of four pieces
continues a paragraph? It prints the share of right answers, by the likelihood of a
choice and by the likelihood per character. Run the same command again, and training
continues from the last checkpoint.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import armillary
from decoding import Sampling, generate, make_keys
from gpt import BATCH_SIZE, EDGE, LOGICAL_RULES, load_data, make_trainer
from multiple_choice import Question, answer, make_rows

PROMPTS = ("The ", "A class ", "If ")
SAMPLING = Sampling(temperature=0.5, top_k=20)
CONTEXT = 64  # characters


class WriteSamples:
    """An action that continues prompts with the current parameters of a trainer.

    All processes of a job must call it, and the first of them writes.

    Args:
        trainer: A trainer of `make_trainer`.
        graph: The structure of its model.
        prompts: The prompts.
        characters: The character of each token.
        manager: Writes the text, as a summary.
        sampling: The rule that chooses a token.
        num_tokens: The number of new tokens after each prompt.
        seed: The same seed gives the same draws, so samples of two steps differ only by
            the parameters.
    """

    def __init__(
        self,
        trainer: armillary.StepTrainer,
        graph: nnx.GraphDef,
        prompts: Sequence[str],
        characters: str,
        manager: armillary.summary.SummaryManager,
        *,
        sampling: Sampling = SAMPLING,
        num_tokens: int = 80,
        seed: int = 0,
    ) -> None:
        self.trainer = trainer
        self.prompts = prompts
        self.characters = characters
        self.manager = manager
        self.rows = encode(prompts, characters)

        def write(batch: dict) -> jax.Array:
            model = nnx.merge(graph, trainer.state["parameters"])
            keys = make_keys(jax.random.key(seed), batch["number"])
            return generate(
                model, batch["tokens"], batch["size"], keys, num_tokens, sampling
            )

        # One function for all calls, so it is compiled once.
        self.write = write

    def generate(self) -> list[str]:
        """Returns the text that follows each prompt, up to the end of a paragraph."""
        source = armillary.data.from_arrays(self.rows, batch_size=len(self.prompts))
        [tokens] = armillary.predict(self.write, source, strategy=self.trainer.strategy)
        return [decode(row, self.characters) for row in tokens]

    def __call__(self, output: armillary.typing.Output) -> None:
        """Logs and writes the text of each prompt."""
        del output
        lines = [
            prompt + text
            for prompt, text in zip(self.prompts, self.generate(), strict=True)
        ]
        if jax.process_index() == 0:
            print("\n".join(lines))
        # A list in Markdown.
        text = "\n".join(f"1. {line!r}" for line in lines)
        step = int(self.trainer.global_step[...])
        self.manager.write_summaries(
            {"samples": armillary.summary.Text(text)}, step=step
        )


def encode(prompts: Sequence[str], characters: str) -> dict[str, np.ndarray]:
    """Returns prompts as rows: their numbers, their tokens with padding, and sizes."""
    number_of = {character: number for number, character in enumerate(characters)}
    sizes = [1 + len(prompt) for prompt in prompts]
    tokens = np.full((len(prompts), max(sizes)), EDGE, np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, 1 : sizes[row]] = [number_of[character] for character in prompt]
    numbers = np.arange(len(prompts), dtype=np.int32)
    return {"number": numbers, "tokens": tokens, "size": np.array(sizes, np.int32)}


def decode(tokens: np.ndarray, characters: str) -> str:
    text = "".join(characters[token] for token in tokens)
    return text.split(characters[EDGE])[0]


def make_questions(rows: dict) -> list[Question]:
    """Returns questions about packed text: which choice continues the context?"""
    pieces = []
    for tokens, segments in zip(rows["tokens"], rows["segment_ids"], strict=True):
        for segment in range(1, segments.max() + 1):
            piece = tokens[segments == segment]
            if len(piece) == len(tokens):  # long enough, and alone in its row
                pieces.append(piece[1:])

    rng = np.random.default_rng(0)
    questions = []
    for number, piece in enumerate(pieces):
        others = rng.choice(len(pieces) - 1, size=3, replace=False)
        chosen = [number, *(number + 1 + others) % len(pieces)]
        order = rng.permutation(4)
        choices = []
        for place in order:
            end = CONTEXT + rng.integers(16, 48)
            choices.append(pieces[chosen[place]][CONTEXT:end])
        right = int(np.flatnonzero(order == 0)[0])
        questions.append(Question(piece[:CONTEXT], choices, right))
    return questions


def make_evaluator(
    trainer: armillary.StepTrainer, graph: nnx.GraphDef, rows: dict[str, Any]
) -> armillary.StepEvaluator:
    """Returns an evaluator that answers all questions once."""

    def answer_batch(state: dict, batch: dict) -> dict:
        return answer(nnx.merge(graph, state["parameters"]), batch)

    source = armillary.data.from_arrays(rows, batch_size=BATCH_SIZE)
    return armillary.StepEvaluator(answer_batch, trainer, source)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generates text during training.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/generation"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--interval", type=int, default=200, help="steps to samples")
    parser.add_argument("--width", type=int, default=64, help="a multiple of 4")
    parser.add_argument(
        "--strategy", choices=["one", "mirrored", "sharded"], default="sharded"
    )
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    strategies = {
        "one": lambda: armillary.OneDeviceStrategy(jax.devices()[0]),
        "mirrored": armillary.MirroredStrategy,
        "sharded": lambda: armillary.ShardedStrategy(logical_rules=LOGICAL_RULES),
    }
    train, held_out, characters = load_data()
    model_options = {
        "num_tokens": len(characters),
        "width": options.width,
        "depth": 2,
        "remat": False,
    }
    strategy = strategies[options.strategy]()
    trainer, graph = make_trainer(strategy, train, model_options, options.steps)
    manager = armillary.summary.SummaryManager(options.run_dir / "train")
    samples = WriteSamples(trainer, graph, PROMPTS, characters, manager)
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=make_evaluator(trainer, graph, make_rows(make_questions(held_out))),
        global_step=trainer.global_step,
        steps_per_loop=min(100, options.interval),
        summary_manager=manager,
        eval_summary_dir=options.run_dir / "eval",
        train_actions=[armillary.actions.PeriodicAction(samples, options.interval)],
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer),
            options.run_dir / "checkpoints",
            checkpoint_interval=200,
        ),
    )
    result = controller.train_and_evaluate(train_steps=options.steps)
    print(f"Test accuracy {result['accuracy']:.2%}")
    print(f"Test accuracy {result['accuracy_norm']:.2%}, by length")


if __name__ == "__main__":
    main()
