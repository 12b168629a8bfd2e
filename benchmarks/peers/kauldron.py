"""Kauldron: its `TrainStep` on a Linen module with the parameters of the others."""

from pathlib import Path
from typing import Any

from benchmarks.peers._case import import_peer
from benchmarks.peers._jax_model import JaxPeer, read_from
from benchmarks.protocol import Options
from benchmarks.tasks import Task

_LOSS = "cross_entropy"


class KauldronContestant(JaxPeer):
    """The step of `kd.train.Trainer`, called as its loop calls it.

    The loop itself, `Trainer.train`, begins again at each call, so it cannot run in
    bursts. Writers and evaluators of that loop are left out. The loss is the loss of
    the last step, because Kauldron reports a single step.
    """

    library = "kauldron"

    def _build(self, task: Task, options: Options) -> dict[str, Any]:
        self._check_devices(options)
        self._kd: Any = import_peer("kauldron.kd", "kauldron")
        self._task = task
        self._steps_per_loop = options.steps_per_loop
        self._sharding = self._kd.sharding.ShardingStrategy()
        self._step, self._state = self._make_step()
        self._batches = read_from(task, 0)
        return {
            "input": "batches gathered as by hand",
            "parameters": self._count_parameters(),
        }

    def run(self, num_steps: int) -> float:
        import jax

        loss = float("nan")
        for number in range(1, num_steps + 1):
            batch = next(self._batches)
            batch = self._kd.sharding.device_put(batch, self._sharding.batch)
            is_end = number % self._steps_per_loop == 0
            self._state, aux = self._step.step(self._state, batch, return_losses=is_end)
            if is_end:
                loss = float(aux.compute(flatten=False).loss_values[_LOSS])
        jax.block_until_ready(self._state)
        return loss

    def _count_parameters(self) -> int:
        import jax

        return sum(leaf.size for leaf in jax.tree.leaves(self._state.params))

    def save(self, folder: str) -> None:
        """Writes a checkpoint to its end."""
        checkpointer = self._make_checkpointer(folder)
        step = int(self._state.step)
        checkpointer.save(self._state, step=step, force=True)
        checkpointer.wait_until_finished()

    def restore(self, folder: str) -> None:
        """Restores what `save` wrote, and reads up to its batches."""
        checkpointer = self._make_checkpointer(folder)
        self._state = checkpointer.restore(self._state)
        self._batches = read_from(self._task, int(self._state.step))

    def _make_checkpointer(self, folder: str) -> Any:
        return self._kd.ckpts.Checkpointer(workdir=Path(folder), save_interval_steps=1)

    def _make_step(self) -> tuple[Any, Any]:
        """Returns the step, and its first state."""
        import jax
        from flax import linen, nnx

        from benchmarks.contestants.functional import SEED, make_optimizer, mean_loss
        from benchmarks.models import make_model

        kd = self._kd
        model = make_model(self._task, nnx.Rngs(SEED), "float32")
        definition, parameters, rest = nnx.split(model, nnx.Param, ...)
        leaves, structure = jax.tree.flatten(parameters)

        class Model(linen.Module):
            """The function of the others, with the same first parameters."""

            batch: str = "batch"

            @linen.compact
            def __call__(self, batch: Any) -> Any:
                own = [
                    self.param(f"parameter_{number}", lambda _, leaf=leaf: leaf)
                    for number, leaf in enumerate(leaves)
                ]
                state = jax.tree.unflatten(structure, own)
                return nnx.merge(definition, state, rest)(batch)

        class Loss(kd.losses.Loss):
            """The mean cross entropy."""

            logits: str = "preds"
            label: str = "batch.label"

            def get_values(self, logits: Any, label: Any) -> Any:
                return mean_loss(logits, label)

        Model.__annotations__["batch"] = kd.kontext.Key
        Loss.__annotations__ |= {"logits": kd.kontext.Key, "label": kd.kontext.Key}
        step = kd.train.TrainStep(
            model=Model(),
            optimizer=make_optimizer(self._task),
            rng_streams=kd.train.RngStreams(seed=SEED),
            sharding=self._sharding,
            init_transform=kd.ckpts.NoopTransform(),
            aux=kd.train.Auxiliaries(losses={_LOSS: Loss()}, metrics={}, summaries={}),
        )
        example = next(read_from(self._task, 0))
        types = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype)
            for name, array in example.items()
        }
        return step, step.init(types)
