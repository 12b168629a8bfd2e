"""Tests of tokens per second, TFLOP/s and MFU, and of the memory of each device."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.data import from_arrays
from armillary.summary import read_metrics
from armillary.trainer import _program, _work
from tests.controller.loops import make_controller
from tests.mistakes import mistakes

PEAK = 1e12
TOKENS = 16
BATCH = 32
WIDTH, HIDDEN = 64, 128
# The first layer needs no gradient of its input.
MODEL_FLOPS = BATCH * (4 * WIDTH * HIDDEN + 6 * HIDDEN)
STATE_BYTES = 4 * (WIDTH * HIDDEN + HIDDEN + 1)  # the weights and the step


def step(weights, batch):
    def loss_fn(weights):
        return (jax.nn.relu(batch["x"] @ weights[0]) @ weights[1]).mean()

    loss, gradients = jax.value_and_grad(loss_fn)(weights)
    gradients = armillary.all_reduce("mean", gradients)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), {"loss": loss}


def make(size=BATCH, strategy=None, step=step, repeat=True, **options):
    data = {"x": np.ones((size, WIDTH), "float32")}
    weights = jnp.ones((WIDTH, HIDDEN)), jnp.ones((HIDDEN, 1))
    source = from_arrays(data, batch_size=BATCH, repeat=repeat)
    trainer = armillary.StepTrainer(step, weights, source, strategy=strategy)
    return armillary.Controller(
        trainer=trainer, global_step=trainer.global_step, steps_per_loop=4, **options
    )


class Summaries:
    def write_summaries(self, values, step):
        self.values = values

    def flush(self):
        pass


def per_step(values):
    """Returns the examples, tokens, FLOP and peaks of one step."""
    speed = values["steps_per_second"]
    return [
        values["examples_per_second"] / speed,
        values["tokens_per_second"] / speed,
        values["tflops_per_second_per_device"] * 1e12 / speed,
        values["mfu"] * PEAK / speed,
    ]


def test_speeds_are_in_the_log_the_summaries_and_the_record(tmp_path, caplog):
    caplog.set_level("INFO", "armillary")
    summaries = Summaries()
    make(
        summary_manager=summaries,
        tokens_per_example=TOKENS,
        peak_flops=PEAK,
    ).train(8)
    expected = [BATCH, BATCH * TOKENS, MODEL_FLOPS, MODEL_FLOPS]
    assert per_step(summaries.values) == pytest.approx(expected)
    pattern = (
        r"train \| step: +8 \| steps/sec: .+ \| tokens/sec: [\d,]+ \| "
        r"TFLOP/s/device: \S+ \| MFU: [\d.]+% \| output: {'loss': .+}"
    )
    assert re.fullmatch(pattern, caplog.messages[-1])

    make(summary_dir=tmp_path, tokens_per_example=TOKENS, peak_flops=PEAK).train(8)
    _, first, second = read_metrics(tmp_path)
    assert per_step(first) == pytest.approx(expected)
    facts = first["per_device"]
    assert facts.pop("temporary_bytes") > 0
    # The metrics of the step are state, too.
    assert STATE_BYTES <= facts.pop("state_bytes") < STATE_BYTES + 2**14
    assert facts == {
        "model_flops_per_step": MODEL_FLOPS,
        "peak_flops_per_second": PEAK,
    }
    assert "per_device" not in second


def make_sharded(devices):
    return armillary.ShardedStrategy(devices=devices)


def find_facts(controller, directory):
    controller.train(4)
    return read_metrics(directory)[-1]


@pytest.mark.parametrize("make_strategy", [armillary.MirroredStrategy, make_sharded])
def test_devices_share_the_work(make_strategy, tmp_path):
    strategy = make_strategy(jax.devices()[:4])
    options = {"tokens_per_example": TOKENS, "peak_flops": PEAK}
    controller = make(strategy=strategy, summary_dir=tmp_path, **options)

    found = find_facts(controller, tmp_path)

    share = MODEL_FLOPS / 4
    expected = [BATCH, BATCH * TOKENS, share, share]
    assert per_step(found) == pytest.approx(expected)
    assert found["per_device"]["model_flops_per_step"] == share


def test_rows_are_counted_in_a_last_batch_that_is_smaller(tmp_path):
    controller = make(3 * BATCH + 8, repeat=False, summary_dir=tmp_path)

    found = find_facts(controller, tmp_path)

    mean = (3 * BATCH + 8) / 4
    ratio = found["examples_per_second"] / found["steps_per_second"]
    assert ratio == pytest.approx(mean, rel=1e-9)


def test_on_an_unknown_device_there_is_no_mfu_and_the_log_line_is_unchanged(
    tmp_path, caplog
):
    caplog.set_level("INFO", "armillary")
    found = find_facts(make(summary_dir=tmp_path), tmp_path)

    assert {"examples_per_second", "tflops_per_second_per_device"} < set(found)
    assert not {"mfu", "tokens_per_second"} & set(found)
    pattern = r"train \| step: +4 \| steps/sec: +[\d.]+ \| output: {'loss': .+}"
    assert re.fullmatch(pattern, caplog.messages[-1])
    [line] = [each for each in caplog.messages if each.startswith("each device")]
    assert re.fullmatch(
        r"each device: state: \S+ kB \| temporaries: \S+ k?B \| step: 1\.07 MFLOP",
        line,
    )


def test_the_peak_of_a_known_device_is_used(tmp_path, monkeypatch):
    def measure(*arguments):
        return _work.Footprint("NVIDIA H100 80GB HBM3", 1, None)

    monkeypatch.setattr(_program, "measure_footprint", measure)
    found = find_facts(make(summary_dir=tmp_path), tmp_path)

    assert found["per_device"]["peak_flops_per_second"] == 989e12
    tflops = found["tflops_per_second_per_device"]
    assert found["mfu"] == pytest.approx(tflops / 989)


def test_an_output_may_have_a_number_of_its_own():
    def own(weights, batch):
        weights, _ = step(weights, batch)
        return weights, {"mfu": jnp.float32(0.5)}

    summaries = Summaries()
    make(step=own, summary_manager=summaries, peak_flops=PEAK).train(4)
    assert summaries.values["mfu"] == 0.5


def fail(*arguments):
    raise RuntimeError("This cannot be counted.")


@pytest.mark.parametrize("name", ["count_model_flops", "_count_bytes"])
def test_a_fact_that_cannot_be_found_is_left_out(name, tmp_path, monkeypatch):
    monkeypatch.setattr(_work, name, fail)
    found = find_facts(make(summary_dir=tmp_path, peak_flops=PEAK), tmp_path)
    assert found["step"] == 4
    assert ("per_device" in found) == (name == "count_model_flops")
    assert ("mfu" in found) == (name == "_count_bytes")


def test_a_trainer_with_loops_of_its_own_has_only_steps_per_second(tmp_path):
    options = {"tokens_per_example": TOKENS, "peak_flops": PEAK}
    make_controller(summary_dir=tmp_path, **options).train(10)
    _, record = read_metrics(tmp_path)
    assert set(record) == {
        *("record", "time", "step", "steps_per_second", "values", "folder")
    }


@pytest.mark.parametrize(
    "make_strategy",
    [lambda devices: None, armillary.MirroredStrategy, make_sharded],
)
def test_memory_is_read_without_compiling_again(make_strategy, monkeypatch):
    measure = _program.measure_footprint
    compiled = []
    seen = []

    def note(name, seconds, **_):
        if "backend_compile" in name:
            compiled.append(name)

    def measured(*arguments):
        before = len(compiled)
        footprint = measure(*arguments)
        seen.append((before, len(compiled), footprint))
        return footprint

    monkeypatch.setattr(_program, "measure_footprint", measured)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        make(strategy=make_strategy(jax.devices()[:4])).train(8)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    [(before, after, footprint)] = seen
    assert before == after > 0
    assert footprint.device_kind == "cpu"
    assert footprint.temporary_bytes is not None


def wrong(**options):
    return lambda: make_controller(**options)


@mistakes(
    {
        TypeError: {},
        ValueError: {
            "`tokens_per_example` is 0.*positive integer": wrong(tokens_per_example=0),
            "`tokens_per_example` is 1.5": wrong(tokens_per_example=1.5),
            "`peak_flops` is -1.0": wrong(peak_flops=-1.0),
            "`peak_flops` is 989, .*one device.*`peak_flops=989e12`": wrong(
                peak_flops=989
            ),
        },
    }
)
def test_wrong_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
