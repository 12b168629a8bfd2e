"""Every public factory of Optax: optimizers, wrappers, schedules and their helpers."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from armillary.errors import DoubleReductionError, StateStructureError
from tests.differential.harness import (
    CLASSES,
    ROWS,
    WIDTH,
    Batch,
    Case,
    Refusal,
    Replica,
)

Make = Callable[[], Any]
RATE = 0.1


class Learner(nnx.Module):
    """A linear classifier, and an optimizer for it."""

    def __init__(self, transform: Any, kind: Any = nnx.Optimizer) -> None:
        self.model = nnx.Dict({k: nnx.Param(v) for k, v in _plain_params().items()})
        self.optimizer = kind(self.model, transform, wrt=nnx.Param)


def losses(params: Any, batch: Batch) -> Any:
    """Returns the cross-entropy of each example, given parameters by name."""
    logits = batch["x"] @ params["kernel"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])


def loss_fn(batch: Batch, replica: Replica) -> Callable[[Any], Any]:
    """Returns the loss as a function of the model, or of a state of it."""

    def loss(model: Any) -> Any:
        return replica.average(losses({k: model[k][...] for k in model}, batch))

    return loss


def simple(learner: Any, batch: Batch, replica: Replica) -> None:
    """Updates with the gradients alone."""
    grads = nnx.grad(loss_fn(batch, replica))(learner.model)
    learner.optimizer.update(learner.model, replica.total(grads))


def with_value(learner: Any, batch: Batch, replica: Replica) -> None:
    """Updates with the loss of the whole batch, too, as adaptive rates ask for."""
    value, grads = nnx.value_and_grad(loss_fn(batch, replica))(learner.model)
    value, grads = replica.total((value, grads))
    learner.optimizer.update(learner.model, grads, value=value)


def with_line_search(learner: Any, batch: Batch, replica: Replica) -> None:
    """Updates with the loss as a function, which a line search evaluates."""
    value_fn = replica.whole(loss_fn(batch, replica))
    value, grads = nnx.value_and_grad(value_fn)(learner.model)
    learner.optimizer.update(
        learner.model,
        grads,
        value=value,
        grad=nnx.state(grads),
        value_fn=value_fn,
    )


def case(name: str, make: Make, step: Any = simple, **options: Any) -> Case:
    """Returns the case of an optimizer."""
    return Case(name=name, make=lambda: Learner(make()), step=step, **options)


def scaled(*transforms: Any) -> Any:
    """Returns a chain that ends with a step downhill."""
    return optax.chain(*transforms, optax.scale(-RATE))


def adam() -> Any:
    return optax.adam(RATE)


RATED = """
    adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad
    fromage lamb lars lion nadam nadamw novograd optimistic_adam_v2
    optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi
    scale_by_rprop scale_by_learning_rate contrib.acprop contrib.ademamix
    contrib.adopt contrib.cocob contrib.dadapt_adamw contrib.dog contrib.dowg
    contrib.galore contrib.madgrad contrib.muon contrib.prodigy
    contrib.schedule_free_adamw contrib.schedule_free_sgd
    contrib.simplified_ademamix contrib.scale_by_madgrad
"""
SCALERS = """
    identity centralize normalize_by_update_norm scale_by_adadelta scale_by_adam
    scale_by_adamax scale_by_adan scale_by_amsgrad scale_by_belief
    scale_by_distance_over_gradients scale_by_factored_rms scale_by_lbfgs
    scale_by_lion scale_by_novograd scale_by_optimistic_gradient
    scale_by_param_block_norm scale_by_param_block_rms scale_by_radam scale_by_rms
    scale_by_rss scale_by_sign scale_by_sm3 scale_by_stddev scale_by_trust_ratio
    scale_by_yogi set_to_zero zero_nans contrib.normalize contrib.scale_by_acprop
    contrib.scale_by_ademamix contrib.scale_by_adopt contrib.scale_by_cocob
    contrib.scale_by_galore contrib.scale_by_simplified_ademamix
"""


def _find(name: str) -> Any:
    owner, _, function = name.rpartition(".")
    return getattr(optax.contrib if owner else optax, function)


def _labels(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def _dimensions(params: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


def _only_state(measure: Any) -> Any:
    """Returns a transformation that keeps a measurement and passes updates on."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, state = measure.update(updates, state, params)
        return updates, state

    return optax.GradientTransformation(measure.init, update)


def _halves() -> dict[str, Any]:
    return {"matrix": optax.adam(RATE), "vector": optax.sgd(RATE, momentum=0.9)}


WRAPPERS: dict[str, Make] = {
    "adam(mu_dtype=bfloat16)": lambda: optax.adam(RATE, mu_dtype=jnp.bfloat16),
    "adamw(mask=...)": lambda: optax.adamw(RATE, mask=_is_matrix),
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), adam()),
    "add_decayed_weights": lambda: scaled(optax.add_decayed_weights(0.1)),
    "add_noise": lambda: scaled(optax.add_noise(0.1, 0.5, jax.random.key(1))),
    "apply_every": lambda: optax.chain(adam(), optax.apply_every(2)),
    "apply_if_finite": lambda: optax.apply_if_finite(adam(), 2),
    "chain": lambda: optax.chain(optax.clip(0.1), adam()),
    "clip": lambda: scaled(optax.clip(0.1)),
    "clip_by_block_rms": lambda: scaled(optax.clip_by_block_rms(0.1)),
    "clip_by_global_norm": lambda: scaled(optax.clip_by_global_norm(0.1)),
    "conditionally_mask": lambda: optax.conditionally_mask(
        adam(), lambda step: jnp.mod(step, 2) == 0
    ),
    "conditionally_transform": lambda: optax.conditionally_transform(
        adam(), lambda step: jnp.mod(step, 2) == 0
    ),
    "ema": lambda: scaled(optax.ema(0.9)),
    "flatten": lambda: optax.flatten(adam()),
    "freeze": lambda: optax.chain(adam(), optax.freeze(_is_matrix)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        learning_rate=optax.linear_schedule(RATE, 0.0, 5)
    ),
    "inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(
        optax.adam
    )(learning_rate=RATE),
    "keep_params_nonnegative": lambda: optax.chain(
        adam(), optax.keep_params_nonnegative()
    ),
    "masked": lambda: optax.masked(adam(), _is_matrix),
    "measure_with_ema": lambda: optax.chain(
        _only_state(optax.measure_with_ema(optax.tree.norm, 0.9)), adam()
    ),
    "multi_transform": lambda: optax.multi_transform(_halves(), _labels),
    "named_chain": lambda: optax.named_chain(("a", optax.clip(0.1)), ("b", adam())),
    "noisy_sgd": lambda: optax.noisy_sgd(RATE, key=jax.random.key(1)),
    "optimistic_adam": lambda: optax.optimistic_adam(RATE, optimism=0.1),
    "partition": lambda: optax.partition(_halves(), _labels),
    "rmsprop(centered, momentum)": lambda: optax.rmsprop(
        RATE, centered=True, momentum=0.9
    ),
    "scale": lambda: optax.scale(-RATE),
    "scale_by_schedule": lambda: optax.scale_by_schedule(lambda count: -RATE / count),
    "selective_transform": lambda: optax.selective_transform(
        adam(), freeze_mask=_is_matrix
    ),
    "snapshot": lambda: optax.chain(optax.snapshot("norm", optax.tree.norm), adam()),
    "stateless": lambda: optax.stateless(
        lambda updates, params: jax.tree.map(lambda u: -RATE * u, updates)
    ),
    "stateless_with_tree_map": lambda: optax.stateless_with_tree_map(
        lambda update, param: -RATE * jnp.multiply(update, param)
    ),
    "trace": lambda: scaled(optax.trace(0.9, nesterov=True)),
    "with_extra_args_support": lambda: optax.with_extra_args_support(adam()),
    "contrib.mechanize": lambda: optax.contrib.mechanize(adam()),
    "contrib.schedule_free": lambda: optax.contrib.schedule_free(
        adam(), learning_rate=RATE
    ),
    "contrib.sam": lambda: optax.contrib.sam(adam(), optax.sgd(0.05), sync_period=2),
}
VALUED: dict[str, Make] = {
    "polyak_sgd": optax.polyak_sgd,
    "scale_by_polyak": lambda: scaled(optax.scale_by_polyak()),
    "contrib.momo": optax.contrib.momo,
    "contrib.momo_adam": optax.contrib.momo_adam,
    "contrib.reduce_on_plateau": lambda: optax.chain(
        adam(), optax.contrib.reduce_on_plateau(patience=0, cooldown=0)
    ),
}
SEARCHES: dict[str, Make] = {
    "lbfgs": optax.lbfgs,
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10)
    ),
    "scale_by_zoom_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_zoom_linesearch(10)
    ),
}
SCHEDULES: dict[str, Make] = {
    "constant_schedule": lambda: optax.constant_schedule(RATE),
    "cosine_decay_schedule": lambda: optax.cosine_decay_schedule(RATE, 3),
    "cosine_onecycle_schedule": lambda: optax.cosine_onecycle_schedule(4, RATE),
    "exponential_decay": lambda: optax.exponential_decay(RATE, 2, 0.5),
    "join_schedules": lambda: optax.join_schedules(
        [optax.constant_schedule(RATE), optax.linear_schedule(RATE, 0.0, 2)], [1]
    ),
    "linear_onecycle_schedule": lambda: optax.linear_onecycle_schedule(4, RATE),
    "linear_schedule": lambda: optax.linear_schedule(RATE, 0.0, 4),
    "piecewise_constant_schedule": lambda: optax.piecewise_constant_schedule(
        RATE, {1: 0.5}
    ),
    "piecewise_interpolate_schedule": lambda: optax.piecewise_interpolate_schedule(
        "cosine", RATE, {2: 0.5}
    ),
    "polynomial_schedule": lambda: optax.polynomial_schedule(RATE, 0.0, 2, 4),
    "sgdr_schedule": lambda: optax.sgdr_schedule(
        [
            dict(init_value=0.0, peak_value=RATE, decay_steps=2, warmup_steps=1),
            dict(init_value=0.0, peak_value=RATE, decay_steps=2, warmup_steps=1),
        ]
    ),
    "warmup_constant_schedule": lambda: optax.warmup_constant_schedule(0.0, RATE, 2),
    "warmup_cosine_decay_schedule": lambda: optax.warmup_cosine_decay_schedule(
        0.0, RATE, 1, 3
    ),
    "warmup_exponential_decay_schedule": (
        lambda: optax.warmup_exponential_decay_schedule(0.0, RATE, 1, 2, 0.5)
    ),
}
MULTI_STEPS: dict[str, Make] = {
    "MultiSteps": lambda: optax.MultiSteps(adam(), 2),
    "MultiSteps(skip_not_finite)": lambda: optax.MultiSteps(
        adam(), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "MultiSteps(skip_large_updates)": lambda: optax.MultiSteps(
        adam(),
        2,
        should_skip_update_fn=lambda *args: optax.skip_large_updates(*args, 0.5),
    ),
}


def _hessian_step(learner: Any, batch: Batch, replica: Replica) -> None:
    """Updates with an estimate of the Hessian, which needs the summed loss."""
    obj_fn = replica.whole(loss_fn(batch, replica))
    grads = nnx.grad(obj_fn)(learner.model)
    learner.optimizer.update(learner.model, grads, obj_fn=obj_fn)


def _each(learner: Any, batch: Batch, replica: Replica) -> Any:
    """Returns the gradient of each example on this replica."""
    params = {name: p[...] for name, p in learner.model.items()}

    def one(params: Any, example: Batch) -> Any:
        return losses(params, jax.tree.map(lambda a: a[None], example))[0]

    return jax.vmap(jax.grad(one), (None, 0))(params, batch)


def _clipped(clip: Any) -> Any:
    """Clips the gradient of each example, and sums what is left over replicas."""

    def step(learner: Any, batch: Batch, replica: Replica) -> None:
        clipped, _ = clip(_each(learner, batch, replica), 0.5)
        for name, value in replica.total(clipped).items():
            learner.model[name][...] -= RATE * value / ROWS

    return step


class Target(Learner):
    """A learner with a slow copy of its model."""

    def __init__(self) -> None:
        super().__init__(adam())
        self.target = nnx.clone(self.model)


def _moving(update: Callable[[Any, Any, Any], Any]) -> Any:
    """Lets the slow copy follow, by its new and old state and the number of steps."""

    def step(learner: Any, batch: Batch, replica: Replica) -> None:
        simple(learner, batch, replica)
        new, old = nnx.state(learner.model), nnx.state(learner.target)
        nnx.update(learner.target, update(new, old, learner.optimizer.step[...]))

    return step


class Plain(nnx.Module):
    """Parameters and the state of a transformation as they are without NNX."""

    def __init__(self, transform: Any, params: Any) -> None:
        self.params = nnx.Variable(params)
        self.opt_state = nnx.Variable(transform.init(params))


def apply(
    state: Plain, transform: Any, grads: Any, reduce: Any = lambda updates: updates
) -> None:
    """Updates parameters as one does without NNX."""
    params = state.params.get_value()
    updates, opt_state = transform.update(grads, state.opt_state.get_value(), params)
    state.params.set_value(optax.apply_updates(params, reduce(updates)))
    state.opt_state.set_value(opt_state)


def plain(name: str, make: Make, **options: Any) -> Case:
    """Returns the case of a transformation in the idiom of plain JAX."""

    def step(state: Any, batch: Batch, replica: Replica) -> None:
        def loss(params: Any) -> Any:
            return replica.average(losses(params, batch))

        params = state.params.get_value()
        grads = replica.total(jax.grad(loss)(params))
        apply(state, make(), grads)

    return Case(
        name=name, make=lambda: Plain(make(), _plain_params()), step=step, **options
    )


def _plain_params() -> Any:
    kernel = jnp.linspace(-1.0, 1.0, WIDTH * CLASSES).reshape(WIDTH, CLASSES)
    return {"kernel": kernel, "bias": jnp.ones(CLASSES)}


def _lookahead_case() -> Case:
    def make() -> Any:
        return optax.lookahead(optax.sgd(RATE), 2, 0.5)

    def step(state: Any, batch: Batch, replica: Replica) -> None:
        def loss(params: Any) -> Any:
            return replica.average(losses(params, batch))

        params = state.params.get_value()
        grads = replica.total(jax.grad(loss)(params.fast))
        apply(state, make(), grads)

    def build() -> Any:
        return Plain(make(), optax.LookaheadParams.init_synced(_plain_params()))

    return Case(
        name="optax.lookahead", make=build, step=step, covers=("optax.LookaheadParams",)
    )


def _complex_case() -> Case:
    def make() -> Any:
        return optax.contrib.split_real_and_imaginary(adam())

    def build() -> Any:
        return Plain(make(), jnp.linspace(0, 1, WIDTH) * (1 + 0.5j))

    def step(state: Any, batch: Batch, replica: Replica) -> None:
        def loss(w: Any) -> Any:
            return replica.average(jnp.abs(batch["x"] @ w - batch["y"]) ** 2)

        params = state.params.get_value()
        grads = jnp.conj(replica.total(jax.grad(loss)(params)))
        apply(state, make(), grads)

    name = "optax.contrib.split_real_and_imaginary"
    return Case(name=name, make=build, step=step)


def _eval_params_case() -> Case:
    def make() -> Any:
        return optax.contrib.schedule_free_adamw(RATE)

    def build() -> Any:
        state = Plain(make(), _plain_params())
        state.average = nnx.Variable(_plain_params())
        return state

    def step(state: Any, batch: Batch, replica: Replica) -> None:
        plain("", make).step(state, batch, replica)
        average = optax.contrib.schedule_free_eval_params(
            state.opt_state.get_value(), state.params.get_value()
        )
        state.average.set_value(average)

    name = "optax.contrib.schedule_free_eval_params"
    return Case(name=name, make=build, step=step)


def _opaque_sam_step(learner: Any, batch: Batch, replica: Replica) -> None:
    loss = loss_fn(batch, replica)
    grads = replica.total(nnx.grad(loss)(learner.model))

    def grad_fn(params: Any, _: Any) -> Any:
        return nnx.state(replica.total(nnx.grad(loss)(params)))

    learner.optimizer.update(learner.model, grads, grad_fn=grad_fn)


def _aggregate_cases(name: str, make: Make) -> list[Case]:
    """Returns the cases of an update with the gradients of single examples.

    With those of all examples it is what one device does, noise included. With those
    of a replica's own, each replica would add the noise of a whole batch.
    """

    def step_on(is_whole: bool, state: Any, batch: Batch, replica: Replica) -> None:
        params = state.params.get_value()

        def one(params: Any, example: Batch) -> Any:
            return losses(params, jax.tree.map(lambda a: a[None], example))[0]

        each = jax.vmap(jax.grad(one), (None, 0))(params, batch)
        if is_whole:
            apply(state, make(), replica.gather(each))
        else:
            apply(state, make(), each, replica.mean)

    build = lambda: Plain(make(), _plain_params())  # noqa: E731
    of_all = Case(
        name=f"optax.contrib.{name}",
        make=build,
        step=functools.partial(step_on, True),
        note="gather the gradients of all examples first (`all_gather`), which are "
        "then reduced already; the noise is that of one device",
    )
    of_own = Case(
        name=f"optax.contrib.{name} (of a replica's own examples)",
        make=build,
        step=functools.partial(step_on, False),
        refusal=Refusal(
            DoubleReductionError,
            "each of . replicas would add the noise of a whole batch",
            "gather the gradients of all examples before the update",
        ),
    )
    return [of_all, of_own]


CASES: list[Case] = [
    *(
        case(f"optax.{n}", lambda n=n: _find(n)(learning_rate=RATE))
        for n in RATED.split()
    ),
    *(case(f"optax.{n}", lambda n=n: scaled(_find(n)())) for n in SCALERS.split()),
    *(case(f"optax.{name}", make) for name, make in WRAPPERS.items()),
    *(
        case(
            f"optax.{name}",
            make,
            covers=tuple(re.findall(r"optax.skip\w+", f"optax.{name[11:]}")),
        )
        for name, make in MULTI_STEPS.items()
    ),
    *(case(f"optax.{name}", make, with_value) for name, make in VALUED.items()),
    *(case(f"optax.{name}", make, with_line_search) for name, make in SEARCHES.items()),
    *(
        case(f"optax.{name}", lambda make=make: optax.sgd(make()))
        for name, make in SCHEDULES.items()
    ),
    plain("optax.apply_updates", adam),
    case(
        "optax.monitor",
        lambda: optax.chain(optax.monitor({"norm": optax.tree.norm}), adam()),
        refusal=Refusal(
            StateStructureError,
            "made by the step",
            "its state has no measurements before the first update: use "
            "`optax.snapshot`",
            (0, 1, 2, 4),
        ),
    ),
    plain(
        "optax.contrib.scale_by_muon",
        lambda: optax.masked(
            scaled(optax.contrib.scale_by_muon(weight_dimension_numbers=_dimensions)),
            _is_matrix,
        ),
    ),
    _eval_params_case(),
    *_aggregate_cases(
        "differentially_private_aggregate",
        lambda: scaled(
            optax.contrib.differentially_private_aggregate(0.5, 1.0, jax.random.key(0))
        ),
    ),
    *_aggregate_cases("dpsgd", lambda: optax.contrib.dpsgd(RATE, 0.5, 1.0, 0)),
    case(
        "optax.contrib.sam(opaque_mode)",
        lambda: optax.contrib.sam(adam(), optax.sgd(0.05), 2, opaque_mode=True),
        _opaque_sam_step,
    ),
    _lookahead_case(),
    _complex_case(),
    *(
        Case(name=f"optax.{n}", make=Target, step=_clipped(getattr(optax, n)))
        for n in ("per_example_global_norm_clip", "per_example_layer_norm_clip")
    ),
    Case(
        name="optax.incremental_update",
        make=Target,
        step=_moving(lambda new, old, _: optax.incremental_update(new, old, 0.1)),
    ),
    Case(
        name="optax.periodic_update",
        make=Target,
        step=_moving(lambda new, old, at: optax.periodic_update(new, old, at, 2)),
    ),
    case("optax.contrib.sophia", lambda: optax.contrib.sophia(RATE), _hessian_step),
    case(
        "optax.contrib.hutchinson_estimator_diag_hessian",
        lambda: scaled(
            optax.contrib.hutchinson_estimator_diag_hessian(jax.random.PRNGKey(0))
        ),
        _hessian_step,
    ),
    Case(
        name="nnx.ModelAndOptimizer",
        make=lambda: Learner(adam(), nnx.ModelAndOptimizer),
        step=lambda learner, batch, replica: learner.optimizer.update(
            replica.total(nnx.grad(loss_fn(batch, replica))(learner.model))
        ),
    ),
]
